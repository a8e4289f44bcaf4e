"""Records of files, URLs and the hub, read one by one with their location."""
