"""Every method with the options that it cannot do without."""

from tunekit import frontend


def required_options(method: frontend.MethodInfo) -> dict[str, object]:
    """Return the options that a method cannot do without, small enough for tiny models."""
    options: dict[str, object] = {"max_completion_length": 4} if method.generates or method.has_teacher else {}
    if method.is_rewarded:
        options["num_generations"] = 2
        if method.name != "ebft":
            options["rewards"] = ["tests.smoke.methods:reward"]
    if method.name == "classification":
        options["labels"] = ["low", "middle", "high"]
    if method.has_teacher:
        options["teacher"] = "other" if method.name == "gold" else "teacher"
    return options


METHODS = {method.name: required_options(method) for method in frontend.list_methods()}


def reward(completions, **columns):
    """Return a reward in which most answers of a group differ."""
    return [sum(map(ord, completion[0]["content"])) % 97 / 97 for completion in completions]
