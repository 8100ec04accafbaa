"""A small trained Llama, and all code that made it. The folder is also its Hugging Face folder."""
