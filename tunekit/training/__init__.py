"""The worker of a run: it builds what the plan says, trains, evaluates and saves."""
