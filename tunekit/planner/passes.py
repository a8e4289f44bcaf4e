from dataclasses import dataclass
@dataclass(frozen=True)
class P: keeps_reference: bool
def passes_of(method, adapter, data, *, global_batch_size):
    from tunekit.recipe.schema import FullAdapter
    return P(isinstance(adapter, FullAdapter) and not method.__dict__.get("precompute_ref_log_probs", False) and bool(method.beta))
