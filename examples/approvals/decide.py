"""An inbox in a few lines: show each open approval with its exact action, and approve it.

The digest binds the vote to the action that was shown. If a colleague edits the action in between, the vote is refused.
"""

from interlock import Client

with Client() as interlock:
    for approval in interlock.approvals(status="requested").items:
        print(f"{approval.action.tool} {approval.action.fields}, tier {approval.tier}")
        decided = interlock.approve_approval(approval.id, reason="checked", digest=approval.action.digest)
        print(f"{decided.status}, {decided.approvers_needed} more needed")
