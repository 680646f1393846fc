"""First values of a model's parameters, as functions of a box: from a folder, from the model itself, or random ones.

Random values are those that the class's `_init_weights` gives a module on one device from a seed made of the module's
name; a rank keeps its box of them. So they are equal under every layout, and one module is whole at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core import rng
from isograd.core.contract import set_init_fn
from isograd.errors import ModelError
from isograd.hf.families import NOT_WEIGHTS
from isograd.hf.stored_weights import StoredWeights
from isograd.io.safetensors_reader import Box, SafetensorsReader

# (name of a parameter, box, device) -> its values there
Source = Callable[[str, Sequence[tuple[int, int]], torch.device], Tensor]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Random:
    """The values that the library gives a model without weights. `noise`, for the proof, is added everywhere."""

    def __init__(self, skeleton: nn.Module, seed: int, noise: float = 0.0) -> None:
        """skeleton: the whole model with its parameters on the meta device; it is used for its modules' code only."""
        self.skeleton, self.seed, self.noise = skeleton, seed, noise

    @torch.no_grad()
    def __call__(self, name: str, box: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """A box of the parameter of this name."""
        home, _, leaf = name.rpartition(".")
        module = self.skeleton.get_submodule(home)
        empty = dict(module._parameters)
        key = rng.key(self.seed, name)
        try:
            for other, parameter in empty.items():
                if parameter is not None:
                    made = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
                    module._parameters[other] = nn.Parameter(made, requires_grad=False)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(key.seed)
                self._owner(home)._init_weights(module)
            found = module._parameters[leaf]
        finally:
            module._parameters.update(empty)
        assert found is not None
        if self.noise:
            found.nan_to_num_()  # a parameter to which only its module's constructor gives a value
        elif bool(found.isnan().any()):
            raise ModelError(
                "IG467",
                f"{type(self.skeleton).__name__} gives {name} no initial values",
                seen=f"_init_weights leaves it as it was: {type(module).__name__}",
                expected="weights for it, in the folder",
            )
        part = found.detach()[tuple(slice(*ends) for ends in box)].to(device, copy=True).contiguous()
        if self.noise and part.numel():
            added = torch.empty_like(part) if part.dim() else torch.empty(1, dtype=part.dtype, device=device)
            ends = list(box) or [(0, 1)]
            rng.init_(added, key.fold("noise"), self.noise, tuple(found.shape) or (1,), ends)
            part += added.view(part.shape)
        return part

    def _owner(self, name: str) -> Any:
        """The nearest model of the library around a module: its `_init_weights` is the module's."""
        found: Any = self.skeleton
        at: Any = self.skeleton
        for part in name.split(".") if name else ():
            at = getattr(at, part)
            found = at if hasattr(at, "_init_weights") else found
        return found


class Folder:
    """The safetensors of a folder under the names that the model has now."""

    def __init__(self, stored: SafetensorsReader, model: Any, where: str) -> None:
        """Refuses missing, unknown and misshapen tensors, all at once and before any is read."""
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
        self.stored = StoredWeights(stored, model, shapes)
        places = self.stored.places
        unknown = [name for name in self.stored.unknown if not name.endswith(NOT_WEIGHTS)]
        tied: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
        for names in tied.values():
            place = next((places[name] for name in names if name in places), None)
            places |= {name: place for name in names if place is not None and name not in places}
        wrong = [f"{name} is missing" for name in shapes if name not in places]
        wrong += [f"{name} is not used" for name in unknown]
        wrong += [
            f"{name} is {self.stored.shape(name)}, not {shapes[name]}"
            for name in places
            if self.stored.shape(name) != shapes[name]
        ]
        if wrong:
            raise ModelError(
                "IG467",
                f"these weights are not those of {type(model).__name__} ({len(wrong)} points)",
                seen="; ".join(wrong[:12]) + (" ..." if len(wrong) > 12 else ""),
                expected="every tensor of the model, under the name that transformers has for it now",
                fix="older names are converted by transformers: AutoModelForCausalLM.from_pretrained(folder)"
                ".save_pretrained(new), once, on one device",
                where=where,
            )

    def read(self, name: str, box: Box) -> Tensor:
        """A box of the parameter or buffer of this name."""
        found = self.stored.read(name, box)
        if found.dtype not in FLOATS and found.is_floating_point():
            raise ModelError(
                "IG462",
                f"{name} is stored in {found.dtype}, which is not trained",
                seen=str(found.dtype),
                expected="float32, bfloat16, float16 or float64",
                fix="convert the weights to bfloat16 with their scales first",
            )
        return found

    def __call__(self, name: str, box: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """The same on a device."""
        return self.read(name, box).to(device)


class Present:
    """The values that a model has now."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}

    def __call__(self, name: str, box: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """A copy of a box of the parameter of this name."""
        return self.values[name][tuple(slice(*ends) for ends in box)].to(device, copy=True).contiguous()


def give_starts(model: nn.Module, source: Source) -> None:
    """Attach to each parameter the function that makes any box of it: the Engine calls it for this rank's rows."""
    for name, parameter in model.named_parameters():
        set_init_fn(parameter, partial(_values, source, name, parameter.dtype))


def _values(
    source: Source, name: str, dtype: torch.dtype, box: Sequence[tuple[int, int]], device: torch.device
) -> Tensor:
    return source(name, box, device).to(dtype)
