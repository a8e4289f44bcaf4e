"""Tools and environments: the processes that they run in, and those that come with tunekit."""
