"""Agents: one call of a model is one step. What the model wants done is other steps, see `journal.turns`."""

from interlock.agents.turn import model_call

__all__ = ["model_call"]
