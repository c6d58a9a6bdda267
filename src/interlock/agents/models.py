"""Models by name: `provider:name`, through pydantic-ai. Each provider is imported on first use."""

import os
from functools import lru_cache
from typing import Any

from pydantic_ai.exceptions import UserError
from pydantic_ai.models import Model, infer_model
from pydantic_ai.providers import Provider, infer_provider, infer_provider_class

from interlock.agents.scripted import scripted
from interlock.definition.agent import KEY_FORM, KEY_VARIABLE, SCRIPTED
from interlock.definition.plan import AgentPlan
from interlock.errors import Terminal


def model_for(agent: AgentPlan) -> Model:
    if agent.model == SCRIPTED:
        return scripted(agent.script)
    return _named(agent.model, agent.base_url, agent.api_key_env)


@lru_cache(maxsize=64)
def _named(model: str, base_url: str | None, api_key_env: str | None) -> Model:
    """Return one client for all calls, so that connections are reused."""
    try:
        return infer_model(model, lambda name: _provider(name, base_url, api_key_env))
    except ImportError as error:
        provider = model.partition(":")[0]
        raise Terminal(f"model {model}: {error}; install interlock[{provider}] where the worker runs") from None
    except (UserError, ValueError) as error:
        raise Terminal(f"model {model}: {error}") from None


def _provider(name: str, base_url: str | None, api_key_env: str | None) -> Provider[Any]:
    if base_url is None and api_key_env is None:
        return infer_provider(name)
    # A custom address often needs no key, but the provider's client requires one. By default it would read the
    # installation's key from the environment and send it there.
    options = {"api_key": _key(name, api_key_env) if api_key_env else "none"}
    if base_url is not None:
        options["base_url"] = base_url
    made: Provider[Any] = infer_provider_class(name)(**options)
    return made


def _key(provider: str, variable: str) -> str:
    if not KEY_VARIABLE.fullmatch(variable):
        raise Terminal(f"api_key_env: expected {KEY_FORM}, found {variable}; apply the agent again with another")
    if not (key := os.environ.get(variable)):
        raise Terminal(f"the environment variable {variable}, which holds the key of {provider}, is not set")
    return key
