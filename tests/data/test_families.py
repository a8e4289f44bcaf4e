"""What is trained in the chat format of each well-known family of models, against renderings worked out by hand.

A golden is the whole text that the model reads, and ⟦ ⟧ hold the pieces that count in the loss. The templates come
from TRL where it has the family's, and are written here from the family's description otherwise.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import trl.chat_template_utils
from transformers import PreTrainedTokenizerFast
from trl import get_training_chat_template

from tests.data.tokenised import Tokenised, tokenised
from tests.data.tokenizers import CHATML, byte_tokenizer
from tests.rows import check_row
from tunekit.data.sources.rows import Rows, RowStore
from tunekit.recipe.sections.data import LossOn

pytestmark = pytest.mark.usefixtures("both_ways")

TRL_TEMPLATES = Path(trl.chat_template_utils.__file__).with_name("chat_templates")

LLAMA_2 = (
    "{% set given = messages[1:] if messages[0].role == 'system' else messages %}{% for m in given %}"
    "{% if m.role == 'user' %}<s>[INST] {% if loop.first and messages[0].role == 'system' %}"
    "<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
MISTRAL = (  # the format V7, in which the tools stand before the last user turn
    "<s>{% for m in messages %}"
    "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}"
    "{% if tools and messages[loop.index:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
PHI_4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GRANITE_3 = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
TULU_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def trl_template(name: str) -> str:
    return (TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Family:
    template: str
    bos: str
    eos: str
    special: tuple[str, ...] = ()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = byte_tokenizer(self.template)
        special = [token for token in self.special if token not in (self.bos, self.eos)]
        tokenizer.add_special_tokens(
            {"bos_token": self.bos, "eos_token": self.eos, "additional_special_tokens": special}
        )
        return tokenizer


LLAMA_SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QWEN_SPECIAL = ("<|im_start|>", "<|im_end|>")
TURN_SPECIAL = ("<start_of_turn>", "<end_of_turn>")
COMMAND_SPECIAL = (
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)
MISTRAL_SPECIAL = (
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[TOOL_CONTENT]",
    "[/TOOL_RESULTS]",
)
DEEPSEEK_SPECIAL = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
HARMONY_SPECIAL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")

FAMILIES = {
    "Llama 2": Family(LLAMA_2, "<s>", "</s>"),
    "Llama 3": Family(trl_template("llama3"), "<|begin_of_text|>", "<|eot_id|>", LLAMA_SPECIAL),
    "Llama 3.1": Family(trl_template("llama3_1"), "<|begin_of_text|>", "<|eot_id|>", LLAMA_SPECIAL),
    "Qwen 2.5": Family(trl_template("qwen2_5"), "<|endoftext|>", "<|im_end|>", QWEN_SPECIAL),
    "Qwen 3": Family(trl_template("qwen3"), "<|endoftext|>", "<|im_end|>", QWEN_SPECIAL),
    "Gemma 3": Family(trl_template("gemma3"), "<bos>", "<eos>", TURN_SPECIAL),
    "Mistral": Family(MISTRAL, "<s>", "</s>", MISTRAL_SPECIAL),
    "Phi-3": Family(
        trl_template("phi3"), "<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    ),
    "Phi-4": Family(PHI_4, "<|endoftext|>", "<|im_end|>", ("<|im_start|>", "<|im_sep|>")),
    "DeepSeek V3": Family(
        trl_template("deepseekv3"), "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", DEEPSEEK_SPECIAL
    ),
    "GPT-OSS": Family(trl_template("gptoss"), "<|startoftext|>", "<|return|>", HARMONY_SPECIAL),
    "ChatML": Family(CHATML, "<s>", "<|im_end|>", QWEN_SPECIAL),
    "Zephyr": Family(ZEPHYR, "<s>", "</s>"),
    "Command R": Family(trl_template("cohere"), "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", COMMAND_SPECIAL),
    "GLM-4.5": Family(trl_template("glm4moe"), "[gMASK]", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>")),
    "Granite 3": Family(GRANITE_3, "<|end_of_text|>", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>")),
    "Tulu 3": Family(TULU_3, "<|begin_of_text|>", "<|end_of_text|>"),
}

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add one.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
TOOL_TEXT = (
    '{"type": "function", "function": {"name": "add", "description": "Add one.", "parameters": '
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}'
)
TOOL_INDENTED = """{
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add one.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {
                    "type": "integer"
                }
            },
            "required": [
                "a"
            ]
        }
    }
}"""

SYSTEM = {"role": "system", "content": "be"}
HI = {"role": "user", "content": "hi"}
HO = {"role": "assistant", "content": "ho"}
MORE = {"role": "user", "content": "more?"}
NO = {"role": "assistant", "content": "no"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "2"}

TWO_TURNS = {"messages": [SYSTEM, HI, HO, MORE, NO]}
WITHOUT_SYSTEM = {"messages": [HI, HO, MORE, NO]}
TOOLS = {"messages": [SYSTEM, HI, CALL, RESULT, HO], "tools": [TOOL]}
THINKING = {"messages": [HI, HO | {"reasoning_content": "hm"}, MORE, NO | {"reasoning_content": "well"}]}
HARMONY_THINKING = {"messages": [HI, HO | {"thinking": "hm"}, MORE, NO | {"thinking": "well"}]}

QWEN_TOOLS = (
    "<|im_start|>system\nbe\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n" + TOOL_TEXT + "\n</tools>"
    "\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_RESULT = "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LLAMA_3_1_SYSTEM = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nbe<|eot_id|>"
HARMONY_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: TODAY\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)

GOLDENS = [
    (
        "Llama 2",
        TWO_TURNS,
        "<s>[INST] <<SYS>>\nbe\n<</SYS>>\n\nhi [/INST]⟦ ho </s>⟧<s>[INST] more? [/INST]⟦ no </s>⟧",
    ),
    (
        "Llama 3",
        TWO_TURNS,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦ho<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nmore?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦no<|eot_id|>⟧",
    ),
    (
        "Llama 3.1",
        TWO_TURNS,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        + LLAMA_3_1_SYSTEM
        + "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦ho<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nmore?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦no<|eot_id|>⟧",
    ),
    (
        "Llama 3.1",
        TOOLS,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
        + LLAMA_3_1_SYSTEM
        + "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, please respond with a JSON for "
        "a function call with its proper arguments that best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
        "Do not use variables.\n\n" + TOOL_INDENTED + "\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "add", "parameters": {"a": 1}}<|eot_id|>⟧'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦ho<|eot_id|>⟧",
    ),
    (
        "Qwen 2.5",
        TWO_TURNS,
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦ho<|im_end|>⟧\n<|im_start|>user\nmore?<|im_end|>\n"
        "<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
    (
        "Qwen 2.5",
        WITHOUT_SYSTEM,
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ho<|im_end|>⟧\n"
        "<|im_start|>user\nmore?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
    (
        "Qwen 2.5",
        TOOLS,
        QWEN_TOOLS
        + '⟦<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>⟧\n'
        + QWEN_RESULT
        + "⟦ho<|im_end|>⟧\n",
    ),
    (
        "Qwen 3",
        TWO_TURNS,
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nho<|im_end|>\n⟧<|im_start|>user\nmore?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nno<|im_end|>\n⟧",
    ),
    (
        "Qwen 3",
        THINKING,
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\nho<|im_end|>\n⟧<|im_start|>user\nmore?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nwell\n</think>\n\nno<|im_end|>\n⟧",
    ),
    (
        "Qwen 3",
        TOOLS,
        QWEN_TOOLS + "⟦<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n⟧'
        + QWEN_RESULT
        + "⟦<think>\n\n</think>\n\nho<|im_end|>\n⟧",
    ),
    (
        "Gemma 3",
        TWO_TURNS,
        "<bos><start_of_turn>user\nbe\n\nhi<end_of_turn>\n<start_of_turn>model\n⟦ho<end_of_turn>⟧\n"
        "<start_of_turn>user\nmore?<end_of_turn>\n<start_of_turn>model\n⟦no<end_of_turn>⟧\n",
    ),
    (
        "Mistral",
        TWO_TURNS,
        "<s>[SYSTEM_PROMPT]be[/SYSTEM_PROMPT][INST]hi[/INST]⟦ho</s>⟧[INST]more?[/INST]⟦no</s>⟧",
    ),
    (
        "Mistral",
        TOOLS,
        "<s>[SYSTEM_PROMPT]be[/SYSTEM_PROMPT][AVAILABLE_TOOLS][" + TOOL_TEXT + "][/AVAILABLE_TOOLS][INST]hi[/INST]"
        '⟦[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "call00001"}]</s>⟧'
        "[TOOL_RESULTS]call00001[TOOL_CONTENT]2[/TOOL_RESULTS]⟦ho</s>⟧",
    ),
    (
        "Phi-3",
        TWO_TURNS,
        "<|system|>\nbe<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n⟦ho<|end|>\n⟧"
        "<|user|>\nmore?<|end|>\n<|assistant|>\n⟦no<|end|>\n<|endoftext|>⟧",
    ),
    (
        "Phi-4",
        TWO_TURNS,
        "<|im_start|>system<|im_sep|>be<|im_end|><|im_start|>user<|im_sep|>hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦ho<|im_end|>⟧<|im_start|>user<|im_sep|>more?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦no<|im_end|>⟧",
    ),
    (
        "DeepSeek V3",
        TWO_TURNS,
        "<｜begin▁of▁sentence｜>be<｜User｜>hi<｜Assistant｜>⟦ho<｜end▁of▁sentence｜>⟧"
        "<｜User｜>more?<｜Assistant｜>⟦no<｜end▁of▁sentence｜>⟧",
    ),
    (
        "DeepSeek V3",
        TOOLS,
        "<｜begin▁of▁sentence｜>be<｜User｜>hi"
        "<｜Assistant｜>⟦<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>2<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>⟦ho<｜end▁of▁sentence｜>⟧",
    ),
    (
        "GPT-OSS",
        TWO_TURNS,
        HARMONY_SYSTEM + "<|end|><|start|>developer<|message|># Instructions\n\nbe\n\n<|end|>"
        "<|start|>user<|message|>hi<|end|>⟦<|start|>assistant<|channel|>final<|message|>ho<|end|>⟧"
        "<|start|>user<|message|>more?<|end|>⟦<|start|>assistant<|channel|>final<|message|>no<|return|>⟧",
    ),
    (
        "GPT-OSS",
        HARMONY_THINKING,
        HARMONY_SYSTEM + "<|end|><|start|>user<|message|>hi<|end|>"
        "⟦<|start|>assistant<|channel|>final<|message|>ho<|end|>⟧<|start|>user<|message|>more?<|end|>"
        "⟦<|start|>assistant<|channel|>analysis<|message|>well<|end|>"
        "<|start|>assistant<|channel|>final<|message|>no<|return|>⟧",
    ),
    (
        "GPT-OSS",
        TOOLS,
        HARMONY_SYSTEM + "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nbe\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Add one.\ntype add = (_: {\na: number,\n}) => any;\n\n} // namespace functions<|end|>"
        "<|start|>user<|message|>hi<|end|>"
        '⟦<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>⟧'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|>'
        "⟦<|start|>assistant<|channel|>final<|message|>ho<|return|>⟧",
    ),
    (
        "ChatML",
        TWO_TURNS,
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ho<|im_end|>⟧\n"
        "<|im_start|>user\nmore?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
    (
        "Zephyr",
        TWO_TURNS,
        "<|system|>\nbe</s>\n<|user|>\nhi</s>\n<|assistant|>\n⟦ho</s>⟧\n<|user|>\nmore?</s>\n<|assistant|>\n⟦no</s>⟧\n",
    ),
    (
        "Command R",
        TWO_TURNS,
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>be<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦ho<|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>more?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦no<|END_OF_TURN_TOKEN|>⟧",
    ),
    (  # a turn ends where the model writes the header of the next one
        "GLM-4.5",
        TWO_TURNS,
        "[gMASK]<sop><|system|>\nbe<|user|>\nhi<|assistant|>⟦\n<think></think>\nho<|user|>⟧\nmore?"
        "<|assistant|>⟦\n<think></think>\nno<|user|>⟧",
    ),
    (
        "Granite 3",
        TWO_TURNS,
        "<|start_of_role|>system<|end_of_role|>be<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>hi<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦ho<|end_of_text|>⟧\n"
        "<|start_of_role|>user<|end_of_role|>more?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦no<|end_of_text|>⟧\n",
    ),
    (
        "Tulu 3",
        TWO_TURNS,
        "<|system|>\nbe\n<|user|>\nhi\n<|assistant|>\n⟦ho<|end_of_text|>⟧\n"
        "<|user|>\nmore?\n<|assistant|>\n⟦no<|end_of_text|>⟧\n",
    ),
]


def rows(row: dict) -> Rows:
    return Rows(
        format="messages", rows=RowStore([check_row(row, "messages")]), source="data.jsonl", numbers=range(1, 2)
    )


def trained(name: str, row: dict, loss_on: LossOn = "assistant") -> tuple[PreTrainedTokenizerFast, Tokenised]:
    tokenizer = FAMILIES[name].tokenizer()
    return tokenizer, tokenised(rows(row), tokenizer, max_length=5000, loss_on=loss_on)


NAMES = [f"{name}, {['two turns', 'tools'][row is TOOLS]}, {i}" for i, (name, row, _) in enumerate(GOLDENS)]


@pytest.mark.parametrize(("name", "row", "golden"), GOLDENS, ids=NAMES)
def test_a_family_is_rendered_and_trained_as_worked_out_by_hand(name, row, golden):
    tokenizer, made = trained(name, row)
    shown = ""
    for token, label in zip(made.sequences[0]["input_ids"], made.sequences[0]["labels"], strict=True):
        piece = tokenizer.decode([token])
        shown += piece if label == -100 else f"⟦{piece}⟧"
    assert re.sub(r"Current date: [\d-]+", "Current date: TODAY", shown.replace("⟧⟦", "")) == golden


GIVEN = {"DeepSeek V3": ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>")}
"""Tokens that TRL's template marks and that stand before the model begins to write: a prompt ends in them."""

KNOWN_TO_TRL = ("Llama 3", "Qwen 2.5", "Qwen 3", "Gemma 3", "Phi-3", "DeepSeek V3", "GPT-OSS", "Command R", "GLM-4.5")


@pytest.mark.parametrize(
    ("name", "row"),
    [pytest.param(name, row, id=i) for i, (name, row, _) in zip(NAMES, GOLDENS, strict=True) if name in KNOWN_TO_TRL],
)
def test_the_mask_of_a_family_is_that_of_trl_but_for_what_stands_around_a_turn(name, row):
    tokenizer, made = trained(name, row)
    theirs = tokenizer.apply_chat_template(
        row["messages"],
        tools=row.get("tools"),
        chat_template=get_training_chat_template(tokenizer),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ours = made.sequences[0]
    assert ours["input_ids"] == theirs["input_ids"]
    assert any(theirs["assistant_masks"])
    for token, label, mark in zip(ours["input_ids"], ours["labels"], theirs["assistant_masks"], strict=True):
        same = (label != -100) == bool(mark)
        assert same or (bool(mark) and tokenizer.decode([token]) in ("\n", *GIVEN.get(name, ())))


def test_goldens_cover_more_than_twelve_families():
    assert {name for name, _, _ in GOLDENS} == set(FAMILIES)
    assert len(FAMILIES) > 12


@pytest.mark.parametrize(
    ("name", "row", "kinds"),
    [
        ("DeepSeek V3", TOOLS, ["tools"]),
        ("DeepSeek V3", THINKING, ["reasoning"]),
        ("GPT-OSS", HARMONY_THINKING, ["reasoning"]),
        ("Phi-3", TOOLS, ["tool calls", "tool messages", "tools"]),
        ("Qwen 3", TOOLS, []),
        ("Qwen 3", THINKING, []),
        ("Llama 3.1", TOOLS, []),
    ],
)
def test_what_the_template_of_a_family_leaves_out_is_told(name, row, kinds):
    # A call that is left out may only stand in a turn that is not learned.
    _, made = trained(name, row, "last" if "tool calls" in kinds else "assistant")
    assert [note for note in made.report.notes if "chat template drops" in note] == [
        f"data.jsonl: in 1 of 1 row checked, the chat template drops {kind}; the model does not see them"
        for kind in kinds
    ]
