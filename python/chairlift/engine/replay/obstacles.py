"""What speaks against leaving a model's Python out, before anything was recorded."""

from collections.abc import Iterator

import torch
from torch.nn.modules import module as modules

from chairlift.probe import ModelFacts

# Hooks that transformers leaves on models whose inner outputs were asked for once; they act only when they are again.
_CAPTURING = "transformers.utils.output_capturing"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def obstacle(model: torch.nn.Module, facts: ModelFacts) -> str | None:
    """Why a model's forwards cannot be recorded; None where nothing is known to speak against it."""
    return next(_obstacles(model, facts), None)


def _obstacles(model: torch.nn.Module, facts: ModelFacts) -> Iterator[str]:
    device = facts.calls[0].kind.device
    if device.type != "cpu":
        yield f"the model is on {device}"
    if facts.first_regime is not None:
        yield "its RoPE looks at the longest position of a forward"
    if torch.is_autocast_enabled(device.type):
        yield "it runs under autocast"
    if any(getattr(modules, name, None) for name in _GLOBAL_HOOKS):
        yield "hooks are registered for the forward of every module"
    for name, module in model.named_modules():
        yield from (f"{reason} ({name or type(model).__name__})" for reason in _obstacles_of(module))


def _obstacles_of(module: torch.nn.Module) -> Iterator[str]:
    for hooks in _HOOKS:
        if any(getattr(hook, "__module__", None) != _CAPTURING for hook in getattr(module, hooks).values()):
            yield "a module has forward hooks"
    if "forward" in vars(module) or "__call__" in vars(module):
        yield "a module's forward was replaced"
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        yield "a module is compiled"
    if isinstance(module, torch.jit.ScriptModule):
        yield "a module is a TorchScript"
