"""Which models the engine can train: real gradients, one value for each element. Others are refused when it is made."""

from __future__ import annotations

from torch import nn

from isograd.comm.notes import gather_notes
from isograd.contract import Table
from isograd.engine.start import hooks_of
from isograd.errors import EngineError
from isograd.mesh import Mesh


def refuse_unfit(model: nn.Module, table: Table, mesh: Mesh) -> None:
    """On all ranks alike: stages of a pipeline hold different parameters."""
    complex_ones = [r.name for r in table if r.parameter.requires_grad and r.parameter.is_complex()]
    sparse = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    ]
    hooked = [r.name for r in table if hooks_of(r.parameter)]
    notes = gather_notes([complex_ones, sparse, hooked], mesh.group("world"), mesh.device)
    complex_ones, sparse, hooked = (list(dict.fromkeys(n for note in notes for n in note[kind])) for kind in range(3))
    if hooked:
        raise EngineError(
            "IG545",
            "a parameter has a hook of its own for accumulated gradients",
            seen=f"register_post_accumulate_grad_hook on {hooked[:8]}",
            expected="gradients that nobody changes or takes away before they are summed over ranks",
            fix="remove the hook; look at gradients with engine.grads() between backward and step, and let the "
            "optimizer step in engine.step()",
            where=mesh.where(),
        )
    if complex_ones:
        raise EngineError(
            "IG541",
            "complex parameters are not trained: sums and optimizers here take real numbers",
            seen=f"complex: {complex_ones[:8]}",
            expected="real parameters",
            fix="store torch.view_as_real(p) as the parameter and use torch.view_as_complex in forward; or freeze it",
            where=mesh.where(),
        )
    if sparse:
        raise EngineError(
            "IG544",
            "sparse gradients of embeddings are not reduced",
            seen=f"sparse=True: {sparse[:8]}",
            expected="dense gradients, of which each rank keeps its rows (from zero1 on)",
            fix="set sparse=False (module.sparse = False before the first forward), or freeze the weight",
            where=mesh.where(),
        )
