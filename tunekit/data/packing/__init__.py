"""Token sequences on disk, packed, mixed, streamed and split."""
