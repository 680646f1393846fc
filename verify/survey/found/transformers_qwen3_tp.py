"""transformers' tensor parallelism: q_norm and k_norm of Qwen 3 are reduced again with every micro-batch.

    torchrun --nproc-per-node 2 transformers_qwen3_tp.py

The same batch twice, without clearing gradients between, must give each gradient twice. The gradients of the norms of
queries and keys are summed over the ranks as they are in .grad after a backward, so what an earlier backward left there
is summed again. On two ranks they are three times the gradient of one backward.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, set_seed

dist.init_process_group("gloo")
set_seed(0)
config = Qwen3Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=32,
)  # fmt: skip
with tempfile.TemporaryDirectory() as place:
    places = [place]
    dist.broadcast_object_list(places)  # save_pretrained writes on the first rank only
    Qwen3ForCausalLM(config).save_pretrained(places[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(places[0], tp_plan="auto", dtype=torch.float32)
    dist.barrier()
tokens = torch.randint(64, (2, 12))


def gradients():
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in grads.items()}


once, twice = gradients(), gradients()
if dist.get_rank() == 0:
    for name in once:
        print(f"{float((twice[name] * once[name]).sum() / once[name].square().sum()):.2f} x one backward: {name}")
dist.destroy_process_group()
