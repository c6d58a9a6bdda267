// The one script of the console: it keeps pages current, sends decisions and maps keys to buttons.
// Every page works without it.

// ---------------------------------------------------------------- changing a page in place

// An update from the server must not change what a person opened, typed or chose, or what this script set.
const KEPT = ["open", "value", "data-selected", "data-changed", "style"];

/** Make `now` like `next` and touch only what differs, so that focus, scroll positions and typed text stay. */
function morph(now, next) {
  if (now.isEqualNode(next)) return;
  if (now.nodeType !== next.nodeType || now.nodeName !== next.nodeName || (now.id && now.id !== next.id)) {
    now.replaceWith(next);
    return;
  }
  if (now.nodeType !== Node.ELEMENT_NODE) {
    now.nodeValue = next.nodeValue;
    return;
  }
  if (now.matches(".note, [data-armed]")) return; // this script's own text
  for (const { name, value } of [...next.attributes]) {
    const ours = KEPT.includes(name) && !(name === "value" && now.type === "hidden");
    if (now.getAttribute(name) !== value && !ours) now.setAttribute(name, value);
  }
  for (const { name } of [...now.attributes]) {
    if (!next.hasAttribute(name) && !KEPT.includes(name)) now.removeAttribute(name);
  }
  if (now.matches("textarea")) return;
  morphChildren(now, next);
}

function morphChildren(now, next) {
  const known = new Map([...now.children].filter((child) => child.id).map((child) => [child.id, child]));
  let place = now.firstChild;
  for (const wanted of [...next.childNodes]) {
    const same = wanted.id ? known.get(wanted.id) : null;
    if (same) {
      if (same !== place) now.insertBefore(same, place);
      else place = place.nextSibling;
      if (isCard(same)) updateCard(same, wanted);
      else morph(same, wanted);
    } else if (place && !place.id && place.nodeName === wanted.nodeName && !wanted.id) {
      const following = place.nextSibling;
      morph(place, wanted);
      place = following;
    } else {
      now.insertBefore(wanted, place);
    }
  }
  while (place) {
    const following = place.nextSibling;
    place.remove();
    place = following;
  }
}

// ---------------------------------------------------------------- cards of approvals

const CARD = ".card.ask";
const cardsOf = (root) => [...root.querySelectorAll(CARD)];
const isCard = (node) => node.matches?.(CARD) ?? false;
const digestOf = (card) => card.querySelector("[name=digest]")?.value;

/** Show a card as the server has it now. It never gets smaller, so that the cards below it stay where they are. */
function updateCard(card, next) {
  const { height } = card.getBoundingClientRect();
  const was = digestOf(card);
  const is = digestOf(next);
  if (was && is && was !== is) {
    disarm(card);
    card.dataset.changed = "";
    if (!card.querySelector(".note").textContent) note(card, "This action was changed just now. Read it again before you decide.");
  } else if (!is && "changed" in card.dataset) {
    delete card.dataset.changed;
    note(card, "");
  }
  morph(card, next);
  if (card.getBoundingClientRect().height < height) card.style.minHeight = `${height}px`;
}

/** Say something on a card. It stays until the card says something else. */
function note(card, text) {
  const line = card.querySelector(".note");
  line.textContent = text;
  line.hidden = !text;
}

/** Say something in the corner of the page, for a few seconds. */
function toast(text) {
  const line = document.createElement("p");
  line.className = "toast";
  line.setAttribute("role", "status");
  line.textContent = text;
  document.getElementById("toasts").replaceChildren(line);
  setTimeout(() => line.remove(), 8000);
}

/**
 * Update the cards of a list where they stand. A decided card stays, greyed. New ones wait behind a button, unless the
 * list has no card that they could move.
 */
function updateList(list, page) {
  const next = page.getElementById(list.id);
  const shown = cardsOf(list);
  if (!shown.length) {
    morph(list, next);
    return 0;
  }
  const known = new Map(cardsOf(page).map((card) => [card.id, card]));
  const fresh = cardsOf(next).filter((card) => !document.getElementById(card.id));
  for (const card of shown) {
    if (known.has(card.id)) updateCard(card, known.get(card.id));
    else card.querySelector(".decide")?.remove(); // deleted, or no longer visible to this visitor
  }
  return fresh.length;
}

// ---------------------------------------------------------------- where cards are

// A press on a card that moved less than a second ago may be meant for another card.
const SETTLING_MS = 1000;
const places = new WeakMap();

/** Record the position of every card's buttons. `own`: the person moved them, by opening or closing something. */
function watchPlaces({ own = false, first = false } = {}) {
  const now = performance.now();
  for (const form of document.querySelectorAll(".decide")) {
    const box = form.querySelector(".buttons").getBoundingClientRect();
    const at = [Math.round(box.left + scrollX), Math.round(box.top + scrollY), digestOf(form)].join(" ");
    const before = places.get(form);
    if (!before) places.set(form, { at, moved: first ? -Infinity : now });
    else if (before.at !== at) Object.assign(before, { at, moved: own ? before.moved : now });
  }
}

/** The script scrolled the page, so every card has a new position on the screen. */
function moveAll() {
  for (const form of document.querySelectorAll(".decide")) if (places.has(form)) places.get(form).moved = performance.now();
}

function movedLately(form) {
  watchPlaces();
  return performance.now() - places.get(form).moved < SETTLING_MS;
}

watchPlaces({ first: true });
setInterval(watchPlaces, 250);
// What a person opens moves what is below it. The browser opens it after this event.
document.addEventListener("click", (event) => {
  if (event.target.closest("summary")) setTimeout(() => watchPlaces({ own: true }));
});

/** Return whether at least half of the element is visible, or as much as fits on the screen. */
function inView(element) {
  const box = element.getBoundingClientRect();
  const height = Math.min(box.bottom, innerHeight) - Math.max(box.top, 0);
  return box.height > 0 && height >= Math.min(box.height, innerHeight) / 2;
}

// ---------------------------------------------------------------- staying current

const live = document.body.dataset.live;
// The server sends something at least every 15 seconds.
const SILENT_MS = 40_000;
let stream = null;
let heardAt = Date.now();
let isCurrent = true;
let failures = 0;
let retry = null;
let looking = null;
let again = false;
let wantsAll = false;

/** Bring the page up to date. `all`: new cards too, at the server's places. */
function look({ all = false } = {}) {
  wantsAll ||= all;
  again = true;
  looking ??= lookUntilDone();
  return looking;
}

async function lookUntilDone() {
  try {
    while (again) {
      again = false;
      await lookOnce();
    }
  } finally {
    looking = null;
  }
}

async function lookOnce() {
  const all = wantsAll;
  wantsAll = false;
  try {
    const address = new URL(location.href);
    const shown = all ? [] : cardsOf(document).map((card) => card.id.replace("card-", ""));
    if (shown.length) address.searchParams.set("seen", shown.join("."));
    const answer = await fetch(address, {
      headers: { Accept: "text/html" }, credentials: "same-origin", signal: AbortSignal.timeout(15_000),
    });
    if (answer.redirected && new URL(answer.url).pathname === "/signin") {
      location.assign(answer.url);
      return;
    }
    if (!answer.ok) throw new Error(answer.statusText);
    show(new DOMParser().parseFromString(await answer.text(), "text/html"), all);
    becomeCurrent();
  } catch {
    failures += 1;
    loseTouch();
  }
}

function show(page, all) {
  watchPlaces(); // record earlier movements first: this update did not cause them
  let fresh = 0;
  for (const part of document.querySelectorAll("[data-part]")) {
    const next = page.getElementById(part.id);
    if (!next) continue;
    if (part.hasAttribute("data-steady") && !all) fresh += updateList(part, page);
    else morph(part, next);
  }
  const pill = document.getElementById("fresh");
  if (pill) {
    pill.hidden = !fresh;
    pill.textContent = `${fresh} new`;
  }
  document.title = page.title;
  if (live && !page.body.dataset.live) disconnect();
  watchPlaces();
  document.dispatchEvent(new CustomEvent("interlock:looked"));
}

document.getElementById("fresh")?.addEventListener("click", async () => {
  const before = new Set(cardsOf(document).map((card) => card.id));
  for (const card of cardsOf(document)) card.style.minHeight = "";
  await look({ all: true });
  cardsOf(document).find((card) => !before.has(card.id))?.scrollIntoView({ block: "nearest" });
});

function connect() {
  stream?.close();
  stream = new EventSource(live);
  stream.addEventListener("changed", () => { heardAt = Date.now(); look(); });
  stream.addEventListener("here", () => { heardAt = Date.now(); });
  stream.addEventListener("open", () => { if (!isCurrent) look(); });
  stream.addEventListener("error", loseTouch);
}

function disconnect() {
  stream?.close();
  stream = null;
}

/** The page may be out of date: say so, and look until the server answers again. */
function loseTouch() {
  if (!live) return;
  if (isCurrent) {
    isCurrent = false;
    const banner = document.getElementById("stale");
    banner.textContent = `Not current since ${new Date(heardAt).toTimeString().slice(0, 5)}. Retrying.`;
    banner.hidden = false;
  }
  retry ??= setTimeout(() => { retry = null; look(); }, Math.min(10_000, 500 * 2 ** failures));
}

function becomeCurrent() {
  heardAt = Date.now();
  failures = 0;
  clearTimeout(retry);
  retry = null;
  if (isCurrent) return;
  isCurrent = true;
  document.getElementById("stale").hidden = true;
  if (stream?.readyState === EventSource.CLOSED) connect(); // after some errors the browser does not try again
}

if (live) {
  connect();
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (event) => { if (event.persisted) { connect(); look(); } });
  addEventListener("offline", loseTouch);
  addEventListener("online", () => { if (!isCurrent) look(); });
  setInterval(() => { if (stream && Date.now() - heardAt > SILENT_MS) { connect(); look(); } }, 5000);
}

// ---------------------------------------------------------------- deciding

const AWAY = "The server did not answer, so it is not known whether your decision arrived. Your reason is kept. Press again when the server is back.";
const sending = new WeakSet();

/** A press on a button of a card, with a finger, a mouse or a key. */
function press(form, button) {
  const card = form.closest(CARD);
  if (sending.has(form)) return;
  if (!inView(button)) {
    button.scrollIntoView({ block: "nearest" });
    return;
  }
  if (movedLately(form)) {
    toast("The card moved just now, so nothing was sent. Press again.");
    return;
  }
  const asksTwice = form.hasAttribute("data-twice") || card.hasAttribute("data-changed");
  if (button.dataset.key === "a" && asksTwice && !button.hasAttribute("data-armed")) arm(button);
  else send(form, button);
}

function arm(button) {
  const text = button.lastChild;
  button.dataset.armed = text.nodeValue;
  text.nodeValue = "Press again";
  button.setAttribute("aria-label", "Press again to approve");
  arm.timer = setTimeout(() => disarm(button.closest(CARD)), 8000);
}

function disarm(card) {
  const button = card?.querySelector("[data-armed]");
  if (!button) return;
  button.lastChild.nodeValue = button.dataset.armed;
  button.removeAttribute("data-armed");
  button.removeAttribute("aria-label");
}

async function send(form, button) {
  const card = form.closest(CARD);
  sending.add(form);
  disarm(card);
  note(card, "");
  try {
    const answer = await fetch(button.getAttribute("formaction") ?? form.action, {
      method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "application/json" },
      credentials: "same-origin", signal: AbortSignal.timeout(20_000),
    });
    const said = await answer.json();
    delete card.dataset.changed;
    if (answer.ok) {
      card.focus({ preventScroll: true });
      toast(said.message);
    } else {
      note(card, said.detail ?? said.title);
      sending.delete(form); // it can be corrected at once
    }
    await look();
  } catch {
    note(card, AWAY);
    loseTouch();
  } finally {
    sending.delete(form);
  }
}

// The second click of a double click, or a key that is held down, does not count as a second press.
document.addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest(".decide button")) event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.repeat && event.key === "Enter" && event.target.closest?.(".decide")) event.preventDefault();
});

// ---------------------------------------------------------------- times

const DAY = 86_400;
const units = [["s", 1, 90], ["min", 60, 90], ["h", 3600, 48]];
let exactTimes = false;

/** Return how long ago; after a day, or if a person chose it, the date and time with the zone. */
function said(time) {
  const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
  const length = Math.abs(seconds);
  if (exactTimes || length >= DAY) return time.title;
  const [unit, size] = units.find(([, size, limit]) => length < limit * size);
  const amount = `${Math.round(length / size)} ${unit}`;
  return seconds < 0 ? `in ${amount}` : `${amount} ago`;
}

function tick() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const text = said(time);
    if (time.textContent !== text) time.textContent = text;
  }
}
setInterval(tick, 5000);
document.addEventListener("interlock:looked", tick);

// A tooltip needs a mouse. A touch on a time shows all times in full; a second touch shows them as before.
document.addEventListener("click", (event) => {
  if (!event.target.closest("time") || event.target.closest("a, button, summary")) return;
  exactTimes = !exactTimes;
  tick();
  watchPlaces({ own: true });
});

// ---------------------------------------------------------------- keys

const rows = () => [...document.querySelectorAll("[data-row]")];
const selected = () => document.querySelector("[data-selected]");

function select(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(selected());
  const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step))];
  all[at]?.removeAttribute("data-selected");
  next.setAttribute("data-selected", "");
  next.scrollIntoView({ block: "nearest" });
}

/** Press a button of the selected card. Nothing is decided on a card that is not selected, or not in view. */
function act(key) {
  const card = selected();
  const form = card?.querySelector(".decide");
  const button = form?.querySelector(`[data-key="${key}"]`);
  if (!button) return; // a visitor who may only reject has no other button
  if (!inView(card)) {
    card.scrollIntoView({ block: "nearest" });
    return;
  }
  const reason = form.querySelector("[name=reason]");
  if (key === "r" && !reason.value) reason.focus(); // a rejection comes with a reason; Enter sends it
  else form.requestSubmit(button);
}

const targets = { i: "/inbox", r: "/runs", s: "/sessions", w: "/workers", p: "/policy", j: "/jobs", a: "/audit" };
const GOING_MS = 3000;
let going = null;

/** After `g` the next key selects a page and has no other effect: `a` may be meant for the audit page. */
function startGoing() {
  document.getElementById("going").hidden = false;
  going = setTimeout(stopGoing, GOING_MS);
}

function stopGoing() {
  clearTimeout(going);
  going = null;
  document.getElementById("going").hidden = true;
}

const MODIFIERS = ["Shift", "Control", "Alt", "AltGraph", "Meta", "CapsLock"];

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (typing && event.key === "Escape") typing.blur();
  if (typing || event.metaKey || event.ctrlKey || event.altKey || MODIFIERS.includes(event.key)) return;
  if (going !== null) {
    event.preventDefault();
    if (event.repeat) return;
    stopGoing();
    if (targets[event.key]) location.assign(targets[event.key]);
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "j") select(1);
  else if (event.key === "k") select(-1);
  else if (event.repeat) return;
  else if (event.key === "g" && document.getElementById("going")) startGoing();
  else if (event.key === "?") document.getElementById("keys")?.showModal();
  else if (event.key === "/") document.querySelector("[data-search]")?.focus();
  else if (event.key === "Enter" && [document.body, selected()].includes(document.activeElement)) selected()?.querySelector("[data-open]")?.click();
  else if ((event.key === "a" || event.key === "r") && selected()) act(event.key);
  else if (event.key === "e" && selected()?.querySelector(".edit")) {
    selected().querySelector(".edit").open = true;
    watchPlaces({ own: true });
    selected().querySelector(".edit textarea").focus();
  } else return;
  event.preventDefault();
});

// ---------------------------------------------------------------- conversations

// Follow a growing conversation only if the reader is at its end; do not scroll a reader further up.
const growing = document.querySelector("[data-follow]");
const atEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - 120;
let following = true;

function follow() {
  const before = scrollY;
  if (following) scrollTo(0, document.documentElement.scrollHeight);
  if (scrollY !== before) moveAll();
}

if (growing) {
  scrollTo(0, document.documentElement.scrollHeight);
  addEventListener("scroll", () => { following = atEnd(); }, { passive: true });
  document.addEventListener("interlock:looked", follow);
}

addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || !event.target.matches?.("[data-enter]")) return;
  event.preventDefault();
  if (event.target.value.trim()) event.target.form.requestSubmit();
});

// ---------------------------------------------------------------- small comforts

// On a phone the menu is a strip, and the current page's entry may be outside the visible part.
document.querySelector(".side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.matches(".decide")) {
    event.preventDefault();
    press(form, event.submitter ?? form.querySelector("button"));
    return;
  }
  // Confirm an action that cannot be undone. A second press of a button must not send a second request.
  const question = event.submitter?.dataset.confirm ?? form.dataset.confirm;
  if (question && !confirm(question)) {
    event.preventDefault();
    leaves = false;
    return;
  }
  if (form.dataset.sent) event.preventDefault();
  form.dataset.sent = "yes";
  setTimeout(() => delete form.dataset.sent, 4000);
});

// Number the lines of the text while it is edited. An end of line at its end begins no line of its own.
document.addEventListener("input", (event) => {
  const gutter = event.target.closest?.(".editor")?.querySelector("pre");
  if (!gutter) return;
  const lines = event.target.value.replace(/\n$/, "").split("\n");
  gutter.textContent = lines.map((_, at) => at + 1).join("\n");
});

// Confirm before leaving a page with an unsaved text. Sending the form or discarding the text needs no confirmation.
const draft = document.querySelector("[data-draft]");
let leaves = false;
if (draft) {
  draft.form.addEventListener("submit", () => { leaves = true; });
  for (const link of draft.form.querySelectorAll("[data-discard]")) link.addEventListener("click", () => { leaves = true; });
  addEventListener("beforeunload", (event) => {
    if (!leaves && (draft.dataset.draft === "changed" || draft.value !== draft.defaultValue)) event.preventDefault();
  });
}

for (const button of document.querySelectorAll("[data-theme-switch]")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `interlock_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=lax`;
  });
}
