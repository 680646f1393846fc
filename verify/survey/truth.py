"""The truth about programs of the survey, computed without isograd.

1. The program runs on its ranks as it is. Each rank keeps the weights and what its model was called with and,
   before its first clip or optimizer step, writes the gradient of every parameter by name.
2. One process, in plain torch: the same weights, and for each micro-batch of each rank the gradient of its summed loss
   (the program's function `truth(model, batch)`, which gives the sum and the number of labels, and perhaps a second
   term that is to count as its mean over micro-batches).
3. The gradient of one device is the sum of all of them divided by all labels. What the program made is written as a
   sum of the same contributions; the coefficients, over those of one device, must all be 1.

A program may say more about itself: `plain(args)` the model of step 2 (else tiny.model()), `batch(rank, world, micro,
args)` its data (else what the model was called with), `parts(batch)` what
the library cuts it into, `READERS(world)` the ranks that have data of their own,
`whole(model, batches, args)` one loss over all micro-batches where it is not a sum, `gradients(models)` how to read
gradients that a library keeps elsewhere, `INPUTS()` (class, method) whose third argument holds the data where the model
is not given all of them, `BEFORE` (class, method, condition on its object) the call before which they
are to be read, `RENAME` pairs of texts to replace in names.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import multiprocessing, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from verify.survey.launch import free_port, rank_environment, start

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.", "module.")


def clean(name, program):
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    for old, new in getattr(program, "RENAME", ()):
        name = name.replace(old, new)
    return name


def tensors_in(given):
    """(name, tensor) of a call's arguments; a mapping's members by their own names, a list's by their places."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from tensors_in(value)
        elif isinstance(value, list | tuple) and all(isinstance(v, Mapping) for v in value):
            yield from ((f"{i}.{n}", t) for i, v in enumerate(value) for n, t in tensors_in(v))


class Dump:
    """Writes a rank's weights, calls and gradients, once."""

    def __init__(self, program, rank, out):
        self.program, self.rank, self.out = program, rank, out
        self.roots, self.calls, self.weights, self.depth, self.done = {}, [], {}, 0, False
        nn.Module.__call__ = self.seen(nn.Module.__call__)
        self.inputs = []
        if hasattr(program, "INPUTS") and (where := program.INPUTS()) is not None:
            setattr(*where, self.noted(getattr(*where)))
        register_optimizer_step_pre_hook(self.stepping)
        for home in (nn.utils, nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                setattr(home, name, self.before(getattr(home, name)))
        if hasattr(program, "BEFORE"):
            owner, name, ready = program.BEFORE
            setattr(owner, name, self.before(getattr(owner, name), ready))

    def noted(self, function):
        """A method whose third argument is a mapping of a micro-batch's tensors."""

        def called(own, model, given, *args, **kwargs):
            if not self.done:
                self.inputs.append({k: v.detach().clone() for k, v in tensors_in(given)})
            return function(own, model, given, *args, **kwargs)

        return called

    def stepping(self, optimizer, args, kwargs):
        """A closure makes the gradients inside of step."""
        own, *args = args
        closure = args[0] if args else kwargs.get("closure")
        if closure is None:
            self.write()
            return None

        def after():
            loss = closure()
            self.write()
            return loss

        return (own, after, *args[1:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def before(self, function, ready=lambda first: True):
        def called(*args, **kwargs):
            if ready(args[0]):
                self.write()
            return function(*args, **kwargs)

        return called

    def seen(self, call):
        """nn.Module's call: the outermost ones with a gradient tell the model, its weights and what it was given."""

        def called(module, *args, **kwargs):
            if (
                self.depth == 0
                and not self.done
                and torch.is_grad_enabled()
                and torch._C._current_graph_task_id() == -1  # not again, inside of backward
                and any(p.requires_grad for p in module.parameters())
            ):
                self.roots[id(module)] = module
                given = dict(zip("0123", args, strict=False)) | kwargs
                self.calls.append({k: v.detach().clone() for k, v in tensors_in(given)})
                for name, parameter in self.named().items():
                    if not isinstance(parameter, DTensor):
                        self.weights.setdefault(name, parameter.detach().clone().contiguous())
            self.depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self.depth -= 1

        return called

    def named(self):
        named = {}
        for root in self.roots.values():
            for name, parameter in root.named_parameters():
                named.setdefault(clean(name, self.program), parameter)
        return named

    def write(self):
        if self.done:
            return
        self.done = True
        own = getattr(self.program, "gradients", None)
        if own is not None:
            found = own(self.roots.values())
            gradients = {clean(n, self.program): g for n, g in found.items()}
        else:
            gradients = {n: p.grad for n, p in self.named().items() if p.grad is not None}
        gradients = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
        tensors = {n: g.detach().to_dense().float().clone().contiguous() for n, g in gradients.items()}
        save_file(tensors, self.out / f"rank-{self.rank}.safetensors")
        torch.save([self.inputs or self.calls, self.weights], self.out / f"calls-{self.rank}.pt")


def child(index, program, path, ranks, port, out, arguments):
    rank_environment(index, ranks, port)
    torch.set_num_threads(1)
    sys.argv = [path, *arguments]
    Dump(program, index, out)
    program.main()


def joined(ranks, out, shapes):
    """Name -> gradient, from all ranks; a difference between copies is an error of its own."""
    parts, differ = {}, []
    for rank in range(ranks):
        path = out / f"rank-{rank}.safetensors"
        for name, tensor in (load_file(path) if path.exists() else {}).items():
            parts.setdefault(name, []).append(tensor)
    found = {}
    for name, tensors in parts.items():
        shape = shapes.get(name)
        if shape is None:
            continue
        whole = [t for t in tensors if t.numel() == shape.numel()]
        if whole:
            found[name] = whole[0].view(shape)
            if any(not torch.allclose(t, whole[0], rtol=1e-4, atol=1e-7) for t in whole[1:]):
                differ.append(name)
        elif sum(t.numel() for t in tensors) == shape.numel():  # FSDP1's flat shards
            found[name] = torch.cat([t.flatten() for t in tensors]).view(shape)
    return found, differ


def contributions(program, model, ranks, args, out):
    """[(who, its right coefficient, name -> gradient of the summed loss)] of one process."""
    readers = program.READERS(ranks) if hasattr(program, "READERS") else range(ranks)
    seen = [torch.load(out / f"calls-{r}.pt") for r in range(ranks)]
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in seen[0][1].items():
            if name in own and own[name].shape == weight.shape:
                own[name].copy_(weight)
    if hasattr(program, "batch"):
        micros = {r: [program.batch(r, ranks, m, args) for m in range(args.accumulate)] for r in readers}
    else:
        micros = {r: seen[r][0] for r in readers}
    every = [b for own in micros.values() for b in own]
    if hasattr(program, "parts"):
        micros = {r: [p for b in own for p in program.parts(b)] for r, own in micros.items()}
        every = [b for own in micros.values() for b in own]
    joint = program.whole(model, every, args) if hasattr(program, "whole") else None
    if joint is not None:
        return [("all", 1.0, gradient(model, joint))], []
    sums, more = [], []
    for r, batches in micros.items():
        for m, batch in enumerate(batches):
            loss, labels, *other = program.truth(model, batch)
            sums.append((f"rank {r}, micro-batch {m}", labels, gradient(model, loss)))
            if other:
                _, _, extra = program.truth(model, batch)
                more.append((f"rank {r}, micro-batch {m}, second term", gradient(model, extra)))
    total = sum(labels for _, labels, _ in sums)
    return [(w, 1 / total, g) for w, _, g in sums] + [(w, 1 / len(more), g) for w, g in more], [n for _, n, _ in sums]


def gradient(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}


def judge(found, given, labels, close):
    """What the program's gradients are, tensor by tensor."""
    names = list(dict.fromkeys(n for _, _, g in given for n in g))
    right = {n: sum(c * g[n] for _, c, g in given if n in g) for n in names}
    norm = sum(float(t.square().sum()) for t in right.values()) ** 0.5
    errors, groups, missing = {}, {}, [n for n in names if n not in found]
    for name in names:
        if name not in found:
            continue
        seen = found[name].double()
        floor = max(float(right[name].norm()), 0.1 * close * norm)
        errors[name] = float((seen - right[name]).norm()) / floor
        columns = torch.stack([c * g[name].flatten() for _, c, g in given if name in g], 1)
        if float(right[name].norm()) < 1e-4 * norm:
            continue  # key biases: their true gradient is zero
        if columns.size(0) < columns.size(1):
            continue  # too small to tell its contributions apart
        fit = torch.linalg.lstsq(columns, seen.flatten()[:, None], driver="gelsd")
        rest = float((columns @ fit.solution - seen.flatten()[:, None]).norm()) / floor
        key = tuple(float(f"{c:.4g}") for c in fit.solution.flatten()) if rest < 20 * close else "no such sum"
        same = (
            k
            for k in groups
            if not isinstance(k, str)
            and len(k) == len(key)
            and torch.allclose(torch.tensor(k), torch.tensor(key), atol=close)
        )
        groups.setdefault(key if isinstance(key, str) else next(same, key), []).append(name)
    worst = max(errors.values(), default=float("nan"))
    return {
        "right": bool(errors) and worst < close and not missing,
        "tensors": len(errors),
        "error": float(f"{worst:.1e}"),
        "labels": labels,
        "missing": missing,
        "coefficients": [
            {"of": k if isinstance(k, str) else list(k), "tensors": len(v), "such as": v[0]}
            for k, v in sorted(groups.items(), key=lambda item: -len(item[1]))
        ],
    }


def options_of(program, arguments):
    """The program's own options, as its main reads them."""
    import tiny

    sys.argv = ["", *arguments]
    return tiny.options(*getattr(program, "SWITCHES", ()))


def one(program, path, ranks, close, arguments):
    import tiny

    with tempfile.TemporaryDirectory() as place:
        start(child, ranks, program, path, ranks, free_port(), Path(place), arguments)
        args = options_of(program, arguments)
        model = program.plain(args) if hasattr(program, "plain") else tiny.model()
        given, labels = contributions(program, model, ranks, args, Path(place))
        found, differ = joined(ranks, Path(place), {n: p.shape for n, p in model.named_parameters()})
    said = judge(found, given, labels, close) | {"copies differ": differ}
    return said | {"right": said["right"] and not differ}


def kept(made, *about):
    made.write_text(json.dumps(one(*about)))


def tell(program, path, asked, out):
    """Writes {name: truth} for {name: [ranks, close, arguments]}, each in a process of its own."""
    said, made = {}, Path(out).with_suffix(".one")
    for name, about in asked.items():
        made.unlink(missing_ok=True)
        worker = multiprocessing.get_context("fork").Process(target=kept, args=(made, program, path, *about))
        worker.start()
        worker.join()
        said[name] = json.loads(made.read_text()) if made.exists() else {"failed": "see the log"}
        Path(out).write_text(json.dumps(said))
