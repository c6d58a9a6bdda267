"""Every condition of a statement or of a function of the store on a tenant or a workspace, and the text without it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from interlock.store.queries import STATEMENTS
from tests.store.functions import CREATED

# `run.tenant_id = $1`, `workspace_id IS NOT DISTINCT FROM run.workspace_id`, the second half of `($2::text IS NULL OR
# workspace_id = $2)`, `tenant_id = tenant` with the parameter of a function. Preparing the statement or creating the
# function excludes assignments, which are not comparisons.
_CONDITION = re.compile(
    r"(?<![\w.])(?:\w+\.)?(?P<column>tenant_id|workspace_id|workspace)"
    r" (?:=|IS NOT DISTINCT FROM) (?:(?P<parameter>\$\d+)(?:::\w+)?|\w+(?:\.\w+)?)(?![\w.(])"
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A statement, or a function, whose name ends in `()`, without its n-th condition from the start of the text."""

    statement: str
    number: int
    condition: str
    text: str

    @property
    def is_function(self) -> bool:
        return self.statement.endswith("()")

    def __str__(self) -> str:
        return f"{self.statement}: {self.condition}"


def mutants() -> Iterator[Mutant]:
    texts = {name: statement.text for name, statement in STATEMENTS.items()}
    texts |= {f"{name}()": text for name, text in CREATED.items()}
    for name, text in texts.items():
        for number, found in enumerate(_CONDITION.finditer(text)):
            kind = "uuid" if found["column"] == "tenant_id" else "text"
            # A parameter that occurs nowhere else would have no type.
            holds = f"({found['parameter']}::{kind} IS NULL OR true)" if found["parameter"] else "true"
            yield Mutant(name, number, found[0], text[: found.start()] + holds + text[found.end() :])


# Statements whose conditions no probe can test, by reason.
_UNNOTICED = {
    "the row was read with the caller's tenant and workspace before, by an id that no other row has": (
        "lock_approval approval_on_receipt lock_session get_evidence is_evidence_due children_to_show retries_of "
        "asked_in_runs receipts_of receipts_behind unqueue_run is_queued tree_of leaves_of_run hand_over_reversal "
        "reversed_since undone_since refresh_cards newest_sealed_of_run"
    ),
    "the name belongs to a row that was read with the caller's tenant before; one of another tenant changes only if a "
    "run, a schedule or a cap of the same name is in the same state": (
        "resume_schedule find_workflow_digest owner_of_workflow add_workflow_version set_workflow_cap publish_policy "
        "get_event complete_request complete_requests retake_request request_seen accept_slack_team"
    ),
    "it answers with a digest that says when a page has to look again, and with no row": (
        "pulse_of_inbox pulse_of_runs pulse_of_sessions pulse_of_workers pulse_of_jobs pulse_of_schedules "
        "pulse_of_audit pulse_of_usage"
    ),
    "a worker or a server's background task runs it, for rows that it holds": (
        "take_ready_runs() next_pending_job workflows_with_room lock_due_schedule "
        "advance_schedule reseal_secret has_checkpoint"
    ),
    "a unique index has the tenant and the workspace too: tests/governed/test_receipts.py": "declare_intents",
    "it joins rows of one tenant, whose id was compared before": (
        "tenant_named list_tenants update_tenant usage trigger_for_delivery sealed_secrets "
        "workflows_to_show checkpoints_around_runs last_checkpoints"
    ),
    "it checks a chain, and says how many rows it has checked; every chain is whole here": (
        "count_unsealed runs_to_compare strays checkpoints_around"
    ),
    "it counts up to a quota, which nobody reaches here": (
        "keeps_so_many_events has_so_many_schedules has_so_many_made_plans"
    ),
    "it is asked with ids or digests that the page took from the caller's own rows": "approvals_by_id policy_texts",
    "no request here reaches it; tests/matrix/test_functions.py does": (
        "start_run() take_start_places() places_of() admit_blocked() await_event()"
    ),
    "both tenants have the same Slack team; with several: tests/integrations/test_slack_links.py": "is_in_slack_team()",
    "it needs a place to go on from, a run that is held, or a Slack channel: tests/console, tests/integrations": (
        "last_looked_at held_by newest_sealed slack_destination"
    ),
}  # fmt: skip
UNNOTICED = {statement: reason for reason, statements in _UNNOTICED.items() for statement in statements.split()}
