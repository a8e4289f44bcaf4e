"""tunekit: fine-tune and align open-weight language models. Recipe → Plan → Run."""
