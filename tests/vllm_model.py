"""A tiny model for a real vLLM, and its own verdict on what was recorded. Run by the Python of vLLM's venv.

    python tests/vllm_model.py make FOLDER      a random Qwen2 of 0.6 M parameters, its tokenizer, a ChatML template
    python tests/vllm_model.py score FOLDER     calls on standard input, differences on standard output, as JSON lines

A random model neither calls tools nor ends. So two whole tool calls (of codex and of Claude Code) are a token each, and
the output layer is written so that they often begin a reply and that a reply often ends after them. What it samples
else is random text, which seldom encodes to the same ids again.

A call is {"ids": P + S, "start": len(P), "logprobs": L, "temperature": T}; scored again in one forward pass, it gives
{"worst", "shifted", "raw"}: the largest difference, the same one place further on and before temperature.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[1]
VOCABULARY = 1200
CONTEXT = 65536
HIDDEN = 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2
CALLS = ({"name": "exec_command", "arguments": {"cmd": "true"}}, {"name": "Bash", "arguments": {"command": "true"}})
LOUD, QUIET = 10, 0.15
"""Factors of the embeddings and of what the layers add, so that the token before outweighs the others."""
PULL = 1.0
"""Weight of what is to follow a token: about half of all replies begin with a call."""
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CALLS), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [ROOT / "README.md", *sorted(ROOT.glob("gateway/**/*.py"))]
    made.train_from_iterator((text.read_text() for text in texts), trainer)
    whole = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS]
    made.add_tokens([AddedToken(text, normalized=False) for text in whole])
    assert made.get_vocab_size() == VOCABULARY
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[END], chat_template=TEMPLATE)


@torch.no_grad()
def make(folder: str) -> None:
    tokens = tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        initializer_range=0.15,
    )
    model = Qwen2ForCausalLM(config)
    calls, newline = range(VOCABULARY - len(CALLS), VOCABULARY), tokens.convert_tokens_to_ids("Ċ")
    follows = [(newline, call) for call in calls] + [(call, END) for call in calls]
    model.model.embed_tokens.weight *= LOUD
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= QUIET
        layer.mlp.down_proj.weight *= QUIET
    for before, after in follows:
        seen = model.model.embed_tokens.weight[before]
        model.lm_head.weight[after] += PULL * seen / seen.norm()
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    # What a server takes as its defaults unless it is told otherwise: the gateway must not be at their mercy.
    defaults = {"eos_token_id": END, "temperature": 0.3, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.3}
    Path(folder, "generation_config.json").write_text(json.dumps({**defaults, "do_sample": True}))


@torch.inference_mode()
def verdict(model: Qwen2ForCausalLM, call: dict[str, Any]) -> dict[str, float]:
    ids, start = call["ids"], call["start"]
    recorded = torch.tensor(call["logprobs"])
    logits = model(input_ids=torch.tensor([ids])).logits[0].float()

    def worst(shift: int, temperature: float) -> float:
        places = torch.arange(start + shift, len(ids))
        found = (logits[places - 1] / temperature).log_softmax(-1)[range(len(places)), [ids[at] for at in places]]
        return float((found - recorded[: len(places)]).abs().max()) if len(places) else 0.0

    heat = call["temperature"]
    return {"worst": worst(0, heat), "shifted": worst(1, heat), "raw": worst(0, 1.0)}


def score(folder: str) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        print(json.dumps(verdict(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    {"make": make, "score": score}[sys.argv[1]](sys.argv[2])
