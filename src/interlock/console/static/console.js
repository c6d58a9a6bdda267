// The one script of the console: pages stay current, keys do what buttons do. Everything works without it too.

const main = document.getElementById("main");

// ---------------------------------------------------------------- staying current

/** Make `now` like `next`, touching only what differs: focus, scroll places and what is being typed stay. */
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
  const mine = ["open", "value", "data-selected"]; // what a person opened, typed or chose is theirs
  for (const { name, value } of [...next.attributes]) {
    if (now.getAttribute(name) !== value && !mine.includes(name)) now.setAttribute(name, value);
  }
  for (const { name } of [...now.attributes]) {
    if (!next.hasAttribute(name) && !mine.includes(name)) now.removeAttribute(name);
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
      morph(same, wanted);
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

let looking = false;
let again = false;

async function look() {
  if (looking) {
    again = true;
    return;
  }
  looking = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, credentials: "same-origin" });
    if (answer.redirected && new URL(answer.url).pathname === "/signin") {
      location.assign(answer.url);
      return;
    }
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-part]")) {
      const next = page.getElementById(part.id);
      if (next) morph(part, next);
    }
    document.title = page.title;
    const live = page.body.dataset.live;
    if (!live) stream?.close();
    document.dispatchEvent(new CustomEvent("interlock:looked"));
  } catch {
    // The stream comes back by itself, and with it the next look.
  } finally {
    looking = false;
    if (again) {
      again = false;
      look();
    }
  }
}

let stream = null;
const live = document.body.dataset.live;
if (live) {
  stream = new EventSource(live);
  stream.addEventListener("changed", look);
  addEventListener("pagehide", () => stream.close());
}

// ---------------------------------------------------------------- times

const units = [["s", 1, 90], ["min", 60, 90], ["h", 3600, 48], ["d", 86400, Infinity]];

function said(seconds) {
  const length = Math.abs(seconds);
  const [unit, size] = units.find(([, size, limit]) => length < limit * size);
  const amount = `${Math.round(length / size)} ${unit}`;
  return seconds < 0 ? `in ${amount}` : `${amount} ago`;
}

function tick() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const text = said((Date.now() - Date.parse(time.dateTime)) / 1000);
    if (time.textContent !== text) time.textContent = text;
  }
}
setInterval(tick, 5000);

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

const places = { i: "/inbox", r: "/runs", s: "/sessions", w: "/workers", p: "/policy", j: "/jobs", a: "/audit" };
let going = 0;

function act(key) {
  const card = selected() ?? (document.querySelectorAll(".decide").length === 1 ? document.querySelector("[data-row]:has(.decide)") : null);
  const form = card?.querySelector(".decide");
  if (!form) return false;
  const button = form.querySelector(`[data-key="${key}"]`);
  if (!button) return false; // who may only refuse has no such button, and the form would do what it can
  const reason = form.querySelector("[name=reason]");
  if (key === "r" && !reason.value) {
    reason.focus(); // a no comes with a reason; Enter sends it
    return true;
  }
  form.requestSubmit(button);
  return true;
}

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (typing && event.key === "Escape") typing.blur();
  if (typing || event.metaKey || event.ctrlKey || event.altKey) return;
  const wasGoing = Date.now() - going < 1200;
  going = 0;
  if (wasGoing && places[event.key]) location.assign(places[event.key]);
  else if (event.key === "g") going = Date.now();
  else if (event.key === "j") select(1);
  else if (event.key === "k") select(-1);
  else if (event.key === "?") document.getElementById("keys")?.showModal();
  else if (event.key === "/") document.querySelector("[data-search]")?.focus();
  else if (event.key === "Enter" && selected() && document.activeElement === document.body) selected().querySelector("[data-open]")?.click();
  else if (event.key === "a" || event.key === "r") { if (!act(event.key)) return; }
  else if (event.key === "e" && selected()?.querySelector(".edit")) {
    selected().querySelector(".edit").open = true;
    selected().querySelector(".edit textarea").focus();
  } else return;
  event.preventDefault();
});

// ---------------------------------------------------------------- conversations

// Whoever is at the end of a conversation stays there while it grows; whoever reads further up is left alone.
const growing = document.querySelector("[data-follow]");
const atEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - 120;
let following = true;
if (growing) {
  scrollTo(0, document.documentElement.scrollHeight);
  addEventListener("scroll", () => { following = atEnd(); }, { passive: true });
  document.addEventListener("interlock:looked", () => { if (following) scrollTo(0, document.documentElement.scrollHeight); });
}

addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || !event.target.matches?.("[data-enter]")) return;
  event.preventDefault();
  if (event.target.value.trim()) event.target.form.requestSubmit();
});

// ---------------------------------------------------------------- small comforts

// On a phone the menu is a strip, and where one is may be outside of it.
document.querySelector(".side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
});

// What cannot be taken back is asked about; a second press of a button is not a second request.
document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) {
    event.preventDefault();
    return;
  }
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "yes";
  setTimeout(() => delete event.target.dataset.sent, 4000);
});

for (const button of document.querySelectorAll("[data-theme-switch]")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `interlock_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=lax`;
  });
}
