"""pytorch-ignite's supervised trainer with idist's automatic model, optimizer and loader."""

import ignite.distributed as idist
import tiny
import torch
from ignite.engine import create_supervised_trainer

SWITCHES = ()


def batch(rank, world, micro, args):
    text = tiny.Text(args.uneven)
    rows = [text[(micro * 2 + i) * world + rank] for i in range(2)]
    return torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows])


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def training(rank, args):
    model = idist.auto_model(tiny.model())
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=1e-3))
    loader = idist.auto_dataloader(tiny.Text(args.uneven), batch_size=2 * idist.get_world_size(), shuffle=False)
    trainer = create_supervised_trainer(
        model, optimizer, tiny.loss, gradient_accumulation_steps=args.accumulate,
        prepare_batch=lambda b, **_: (b["input_ids"], b["labels"]),
    )  # fmt: skip
    trainer.run(loader, max_epochs=1, epoch_length=args.steps * args.accumulate)


def main():
    args = tiny.options(*SWITCHES)
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, args)


if __name__ == "__main__":
    main()
