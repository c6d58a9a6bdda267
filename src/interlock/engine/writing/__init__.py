"""The one way in which a run changes: entries, the release of its lease, and their side effects."""
