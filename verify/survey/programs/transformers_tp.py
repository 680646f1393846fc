"""transformers' tensor parallelism (tp_plan="auto") in a plain loop, with a tiny random Llama or Qwen 3."""

import tempfile

import tiny
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, set_seed

SWITCHES = ("qwen3",)


def READERS(world):
    return [0]


def plain(args):
    set_seed(0)
    small = {
        "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**small)) if args.qwen3 else LlamaForCausalLM(LlamaConfig(**small))


def batch(rank, world, micro, args):
    return tiny.text(micro, args.uneven)


def truth(model, batch):
    return tiny.summed(model(input_ids=batch[0]).logits, batch[1])


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as place:
        places = [place]
        dist.broadcast_object_list(places)
        plain(args).save_pretrained(places[0])
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(places[0], tp_plan="auto", dtype=torch.float32)
        dist.barrier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(args.steps):
        for i in range(args.accumulate):
            tokens, labels = batch(0, 1, step * args.accumulate + i, args)
            (tiny.loss(model(input_ids=tokens).logits, labels) / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
