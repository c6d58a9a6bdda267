"""The tables of the contract, typed by hand, so that this test notices a change in `interlock.lifecycle`."""

RUN = """
pending          start   running
pending          hold    waiting_approval
pending          park    waiting_external
pending          fail    failed
pending          cancel  canceling
pending          cancel  canceled
pending          compensate canceling
running          hold    waiting_approval
running          park    waiting_external
running          succeed succeeded
running          fail    failed
running          cancel  canceling
running          cancel  canceled
running          compensate canceling
waiting_approval resume  running
waiting_approval park    waiting_external
waiting_approval succeed succeeded
waiting_approval fail    failed
waiting_approval cancel  canceling
waiting_approval cancel  canceled
waiting_approval compensate canceling
waiting_external resume  running
waiting_external hold    waiting_approval
waiting_external succeed succeeded
waiting_external fail    failed
waiting_external cancel  canceling
waiting_external cancel  canceled
waiting_external compensate canceling
canceling        compensate canceling
canceling        stopped canceled
canceling        fail    failed
"""

STEP = """
pending          claim   running
pending          open    waiting_approval
pending          park    waiting_external
pending          skip    skipped
pending          cancel  canceled
running          reclaim running
running          succeed succeeded
running          retry   pending
running          fail    failed
running          hold    waiting_approval
running          park    waiting_external
running          cancel  canceled
waiting_approval release pending
waiting_approval grant   succeeded
waiting_approval refuse  failed
waiting_approval refuse  skipped
waiting_approval cancel  canceled
waiting_external resume  pending
waiting_external arrive  succeeded
waiting_external fail    failed
waiting_external cancel  canceled
"""

APPROVAL = """
requested approve approved
requested reject  rejected
requested expire  expired
requested cancel  canceled
"""

RECEIPT = """
attempted seal    succeeded
attempted fail    failed
attempted doubt   in_doubt
attempted retry   attempted
attempted confirm succeeded
in_doubt  confirm succeeded
in_doubt  fail    failed
failed    retry   attempted
"""

WORKER = """
idle    start     running
idle    terminate terminated
running pause     paused
running complete  completed
running fail      failed
running terminate terminated
paused  resume    running
paused  terminate terminated
"""

JOB = """
submitted validate pending
submitted fail     failed
submitted cancel   canceled
pending   allocate running
pending   cancel   canceled
running   succeed  completed
running   fail     failed
running   cancel   canceled
"""

IDEMPOTENCY = """
processing complete completed
processing fail     failed
failed     retry    processing
"""

Row = tuple[str, str, str]


def rows(table: str) -> set[Row]:
    found = set()
    for line in table.strip().splitlines():
        source, event, target = line.split()
        found.add((source, event, target))
    return found


TABLES = {
    "run": rows(RUN),
    "step": rows(STEP),
    "approval": rows(APPROVAL),
    "receipt": rows(RECEIPT),
    "worker": rows(WORKER),
    "job": rows(JOB),
    "idempotency": rows(IDEMPOTENCY),
}

STATES = {
    "run": [
        "pending",
        "running",
        "waiting_approval",
        "waiting_external",
        "canceling",
        "succeeded",
        "failed",
        "canceled",
    ],
    "step": [
        "pending",
        "running",
        "waiting_approval",
        "waiting_external",
        "succeeded",
        "skipped",
        "failed",
        "canceled",
    ],
    "approval": ["requested", "approved", "rejected", "expired", "canceled"],
    "receipt": ["attempted", "in_doubt", "failed", "succeeded"],
    "worker": ["idle", "running", "paused", "completed", "failed", "terminated"],
    "job": ["submitted", "pending", "running", "completed", "failed", "canceled"],
    "idempotency": ["processing", "completed", "failed"],
}

TERMINAL = {
    "run": {"succeeded", "failed", "canceled"},
    "step": {"succeeded", "skipped", "failed", "canceled"},
    "approval": {"approved", "rejected", "expired", "canceled"},
    "receipt": {"succeeded"},
    "worker": {"completed", "failed", "terminated"},
    "job": {"completed", "failed", "canceled"},
    "idempotency": {"completed"},
}

REASONS = [
    "completed",
    "rejected",
    "approval_expired",
    "policy_denied",
    "attempts_exhausted",
    "terminal_error",
    "timed_out",
    "external_timeout",
    "orphaned",
    "resume_failed",
    "compensation_failed",
    "cap_exceeded",
    "canceled_by_user",
    "canceled_by_parent",
    "interrupted",
]

# The transitions that every run and step must have, from the first version of the contract.
FIRST_RUN = """
PENDING          RUNNING
RUNNING          WAITING_APPROVAL
WAITING_APPROVAL RUNNING
RUNNING          SUCCEEDED
WAITING_APPROVAL SUCCEEDED
RUNNING          FAILED
WAITING_APPROVAL FAILED
PENDING          CANCELED
RUNNING          CANCELED
WAITING_APPROVAL CANCELED
"""

FIRST_STEP = """
PENDING          RUNNING
RUNNING          SUCCEEDED
RUNNING          PENDING
RUNNING          FAILED
PENDING          WAITING_APPROVAL
WAITING_APPROVAL SUCCEEDED
PENDING          CANCELED
RUNNING          CANCELED
WAITING_APPROVAL CANCELED
RUNNING          RUNNING
"""


def pairs(table: str) -> set[tuple[str, str]]:
    found = set()
    for line in table.strip().lower().splitlines():
        source, target = line.split()
        found.add((source, target))
    return found
