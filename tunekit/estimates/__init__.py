"""Bytes, operations and seconds of a layout, from facts about a model and a machine: pure, without torch."""
