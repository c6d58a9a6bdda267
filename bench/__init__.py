"""The benchmark compares Interlock with a hand-written ceiling, on the same server in the same run. `make bench`."""
