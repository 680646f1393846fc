"""Linear layers of blocks whose products are computed in 8 bits, by torchao.float8.

    left = use_float8(model, mesh, "rowwise_with_gw_hp")     # the names of layers that stay as they are

Parameters, activations and gradients keep their dtype. The two factors of a product are cast, each with a scale for all
numbers that share one, and multiplied by torch._scaled_mm; `emulate`: by a product in fp32 of the cast numbers.

    recipe               y = x W^T                  dx = dy W               dW = dy^T x
    tensorwise           x | W                      dy | W                  dy | x
    rowwise              a token's x | a row of W   a token's dy | a column of W   a feature of dy | of x, over tokens
    rowwise_with_gw_hp   a token's x | a row of W   a token's dy | W        not cast

One device: the same layer. Where tp cuts what shares a scale, its ranks take the maximum of all (`_cast`), so that a
scale is that of one device. Tokens that share one are those of a micro-batch on its data rank: the gradient is that of
one device with these micro-batches. rowwise_with_gw_hp has no scale over tokens, and the gradient of one device however
a batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.first_order import first_order_only
from isograd.core.contract import Contract, contract_of
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.nn.linear import ColumnLinear, RowLinear

OVER_TOKENS = ("tensorwise", "rowwise")  # recipes in which tokens share a scale
CARDS = {"tensorwise": (8, 9)}  # the lowest capability with its kernel; of other recipes (9, 0)
UNIT = 16  # that kernels want to divide both sizes of a matrix
ROUTERS = ("gate", "router", "shared_expert_gate")  # of transformers: they choose experts, and keep their dtype


@dataclass(frozen=True)
class Float8Product:
    """x W^T + b of one layer, in the place of F.linear."""

    config: Any  # torchao's Float8LinearConfig
    products: tuple[Any, Any]  # its LinearMMConfig, of tokens that 16 divides and of others
    mesh: Mesh
    cut: int | None  # the dimension of W that tp cuts

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """input [..., inputs] -> [..., outputs]."""
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        x = input.reshape(-1, input.shape[-1])
        products = self.products[1 if len(x) % UNIT else 0]  # tokens are the inner dimension of dy^T x
        if self.cut is None:
            flat = matmul_with_hp_or_float8_args.apply(x, weight.t(), products, self.config)
        else:
            flat = _cut_product(x, weight.t(), products, self)
        y: Tensor = flat.view(*input.shape[:-1], flat.shape[-1])
        return y if bias is None else y + bias.to(y.dtype)


def _products(config: Any, pads: bool) -> Any:
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    return LinearMMConfig(*(ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, pads) for gemm in gemms))


@ops.uncompiled
def _cut_product(x: Tensor, weight_t: Tensor, products: Any, layer: Float8Product) -> Tensor:
    return _CutProduct.apply(x, weight_t, products, layer)  # type: ignore[no-any-return, no-untyped-call]


class _CutProduct(torch.autograd.Function):
    """torchao's matmul_with_hp_or_float8_args of a layer of which a rank of tp has a part: outputs, or inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor, products: Any, layer: Float8Product) -> Tensor:
        ctx.save_for_backward(x, weight_t)
        ctx.cast, ctx.layer = partial(_cast, products=products, layer=layer), layer
        of_x, of_w = (1, 0) if layer.cut == 1 else (None, 1)
        left = ctx.cast(x, layer.config.cast_config_input, "INPUT", 1, of_x)
        return torch.mm(left, ctx.cast(weight_t, layer.config.cast_config_weight, "WEIGHT", 0, of_w))

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight_t), c = ctx.saved_tensors, ctx.layer.config
        of_x, of_w, of_dy = (1, 0, None) if ctx.layer.cut == 1 else (None, 1, 1)
        left = ctx.cast(dy, c.cast_config_grad_output, "GRAD_OUTPUT", 1, of_dy)
        dx = torch.mm(left, ctx.cast(weight_t, c.cast_config_weight_for_grad_input, "WEIGHT", 1, of_w).t())
        left = ctx.cast(dy, c.cast_config_grad_output_for_grad_weight, "GRAD_OUTPUT", 0, of_dy)
        dw = torch.mm(left.t(), ctx.cast(x, c.cast_config_input_for_grad_weight, "INPUT", 0, of_x))
        return dx, dw.t(), None, None


def _cast(x: Tensor, how: Any, role: str, dim: int, cut: int | None, *, products: Any, layer: Float8Product) -> Any:
    """A factor in 8 bits, of which tp cuts dimension `cut`. Rows along `dim` share a scale, or all numbers do."""
    from torchao.float8.config import ScalingGranularity, ScalingType
    from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

    if how.scaling_type is ScalingType.DISABLED:
        return x
    by_rows = how.scaling_granularity is ScalingGranularity.AXISWISE
    axis = (0, -1)[dim] if by_rows else None
    largest = tensor_to_amax(x, scaling_granularity=how.scaling_granularity, axiswise_dim=axis)
    if cut is not None and (cut == dim or not by_rows):
        largest = raw.all_max(largest, layer.mesh.group("tp"))
    scale = amax_to_scale(largest, how.target_dtype, layer.config.round_scales_to_power_of_2)
    return hp_tensor_and_scale_to_float8(x, scale, how.target_dtype, products, GemmInputRole[role], axis)


def use_float8(model: nn.Module, mesh: Mesh, recipe: str, *, emulate: bool = False) -> list[str]:
    """Compute the trained linear layers of the model's blocks (lists of modules) in 8 bits, by a recipe of torchao.

    Head, embeddings and routers keep their dtype; so do layers with a size that 16 does not divide, whose names are
    returned. emulate: on any device, without its kernels. At ZeRO 3 call it before the Engine is made.
    """
    layers = {name: (layer, contract_of(layer.weight)) for name, layer in _linear_layers(model).items()}
    whole = {
        name: contract.shape if contract else tuple(layer.weight.shape) for name, (layer, contract) in layers.items()
    }
    left = [name for name, shape in whole.items() if any(size % UNIT for size in shape)]
    layers = {name: found for name, found in layers.items() if name not in left}
    _refuse_device(model, mesh, recipe, emulate, left if not layers and mesh.size("pp") == 1 else None)
    _refuse_layout(layers, mesh, recipe)
    from torchao.float8 import Float8LinearConfig

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    products = (_products(config, False), _products(config, True))
    for layer, contract in layers.values():
        product = Float8Product(config, products, mesh, contract.cut.dim if contract and contract.cut else None)
        if isinstance(layer, nn.Linear):
            layer.forward = partial(_forward, layer, product)  # type: ignore[method-assign]
        else:
            layer.product = product
    return left


def _forward(layer: nn.Linear, product: Float8Product, input: Tensor) -> Tensor:
    return product(input, layer.weight, layer.bias)


def _linear_layers(model: nn.Module) -> dict[str, Any]:
    lists = tuple(f"{name}.".lstrip(".") for name, m in model.named_modules() if isinstance(m, nn.ModuleList))
    below = {name: module for name, module in model.named_modules() if name.startswith(lists)}
    return {
        name: module
        for name, module in below.items()
        if isinstance(module, ColumnLinear | RowLinear)
        or (isinstance(module, nn.Linear) and module.weight.requires_grad and name.rpartition(".")[2] not in ROUTERS)
    }


def _refuse_device(model: nn.Module, mesh: Mesh, recipe: str, emulate: bool, all_left: list[str] | None) -> None:
    dtypes, lowest = {p.dtype for p in model.parameters()}, CARDS.get(recipe, (9, 0))
    card = mesh.device.type == "cuda" and torch.cuda.get_device_capability(mesh.device)
    needs = f"bf16 on a card of compute capability {lowest[0]}.{lowest[1]} or above, whose kernels multiply float8"
    for wrong, seen, expected, fix in (
        (find_spec("torchao") is None, "torchao is not installed", "torchao", "pip install 'isograd[float8]'"),
        (not emulate and (not card or card < lowest), f"device {mesh.device}, capability {card or 'none'}", needs,
         "--model.float8_emulate true computes the same numbers slowly, on any device"),
        (not emulate and dtypes != {torch.bfloat16}, f"parameters in {dtypes}", needs, "--model.dtype bf16"),
        (all_left is not None, f"no layer of blocks whose sizes {UNIT} divides; left out: {(all_left or [])[:6]}",
         "linear layers in lists of modules", "leave model.float8 out"),
    ):  # fmt: skip
        if wrong:
            raise ModelError("IG480", recipe=recipe, seen=seen, expected=expected, fix=fix, where=mesh.describe_rank())


def _refuse_layout(layers: dict[str, tuple[Any, Contract | None]], mesh: Mesh, recipe: str) -> None:
    """A layout under which no scale would be that of one device."""
    seen = f"scales over the tokens of a sequence, of which cp{mesh.size('cp')} gives each rank a part"
    if mesh.size("cp") > 1 and recipe in OVER_TOKENS:
        raise ModelError("IG481", recipe=recipe, seen=seen, layout=str(mesh.layout), where=mesh.describe_rank())
    for name, (layer, contract) in layers.items():
        owes = contract is not None and any(axes.startswith("tp") for axes in contract.partial_over)
        if owes or any(size % UNIT for size in layer.weight.shape):
            part = "a gradient that is a sum over tp" if owes else f"a part {tuple(layer.weight.shape)} of its matrix"
            raise ModelError(
                "IG481", recipe=recipe, seen=f"{name}, with {part}", layout=str(mesh.layout), where=mesh.describe_rank()
            )
