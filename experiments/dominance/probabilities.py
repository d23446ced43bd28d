"""How probable are the tokens that a real model samples? The distribution behind TR-GRPO's and RandomSplit's defaults.

    python experiments/dominance/probabilities.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python experiments/dominance/probabilities.py --model FOLDER --gguf FILE --temperature 0.7

SmolLM2-135M-Instruct on 2026-11-15 (4-bit weights, 8 prompts × 8 responses of at most 160 tokens): the mean weight of
`tr-grpo` is 1.06 at temperature 0.7 and 0.84 at temperature 1; 24.5 % and 57 % of the tokens have p < 0.4.

Needs transformers (and gguf for --gguf), which poise's core does not.
"""

from __future__ import annotations

import argparse
import json

import torch

from poise import TokenBatch, regulators

PROMPTS = [
    "Mira baked 48 rolls on Monday and half as many on Tuesday. How many rolls did she bake in all?",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain step by step.",
    "Knights tell the truth, knaves lie. Zoey says that Ethan is a knave. Ethan says that they are alike. Who is who?",
    "What is 17 times 23? Think step by step.",
    "Write a short explanation of why the sky is blue.",
    "If 3x + 5 = 26, what is x? Show your work.",
    "A shop sells pens at 3 for 2 dollars. How much do 18 pens cost?",
    "List the prime numbers between 20 and 50 and say how you found them.",
]


@torch.no_grad()
def sample(model: torch.nn.Module, tokenizer: object, temperature: float, group: int, length: int) -> TokenBatch:
    rows = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"].repeat(group, 1)
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            max_new_tokens=length, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logp = (torch.stack(out.logits, 1).float() / temperature).log_softmax(-1)
        chosen = out.sequences[:, ids.shape[1] :]
        end = (chosen == tokenizer.eos_token_id).long()  # type: ignore[attr-defined]
        inside = end.cumsum(1) - end == 0  # up to and including the first end token
        pad = (0, length - chosen.shape[1])
        chosen_logp = logp.gather(2, chosen[..., None])[..., 0]
        rows.append((torch.nn.functional.pad(chosen_logp, pad), torch.nn.functional.pad(inside, pad)))
        print(f"sampled {group} responses to {prompt[:40]!r}", flush=True)
    logp, mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return TokenBatch(logp, mask, torch.ones(len(logp)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--length", type=int, default=160)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    extra = {"gguf_file": args.gguf} if args.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(args.model, **extra)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **extra).eval()
    for temperature in args.temperature:
        torch.manual_seed(0)
        batch = sample(model, tokenizer, temperature, args.group, args.length)
        prob = batch.prob[batch.mask]
        edges = torch.tensor([0.0, 0.1, 0.25, 0.4, 0.5, 0.75, 0.9, 0.99, 1.0])
        counts = torch.histogram(prob, edges).hist / len(prob)
        shares = {f"{a:.2f}-{b:.2f}": round(float(c), 4) for a, b, c in zip(edges, edges[1:], counts, strict=False)}
        means = {
            name: round(float(regulators.get(name)(batch)[0].policy[batch.mask].mean()), 4)
            for name in ("ar", "amplify", "tr-grpo")
        }
        below = {f"p<{t}": round(float((prob < t).float().mean()), 4) for t in (0.4, 0.5)}
        print(
            json.dumps(
                {"temperature": temperature, "tokens": len(prob), "shares": shares, "mean weight": means} | below
            )
        )


if __name__ == "__main__":
    main()
