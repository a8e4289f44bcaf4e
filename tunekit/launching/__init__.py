"""From a plan to processes: here, over SSH, by torchrun, Slurm, Ray or SkyPilot."""
