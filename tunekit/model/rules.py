"""What is looked for in a model that is fused, in this order: a layer is fused around a norm that is."""

from tunekit.model.fuse import Rule
from tunekit.model.fuse_attention import attention_rule
from tunekit.model.gated_forms import gated_rule
from tunekit.model.layer_forms import layer_rule
from tunekit.model.lora_layers import linear_rule
from tunekit.model.norm_forms import norm_rule

RULES: tuple[Rule, ...] = (linear_rule, norm_rule, gated_rule, attention_rule, layer_rule)
