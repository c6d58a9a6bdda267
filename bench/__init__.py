"""The benchmark: Interlock beside a hand-written ceiling, on the same server in the same run. `make bench`."""
