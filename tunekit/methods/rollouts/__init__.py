"""Which completions a step learns from: groups with signal, those of earlier steps, those that were asked for ahead."""
