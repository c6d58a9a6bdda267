"""Agents: one model call is one step.

The tool calls that the model asks for are other steps, see `journal.agent_loop`.
"""

from interlock.agents.model_turn import model_call

__all__ = ["model_call"]
