"""A small Llama that was really trained, and everything that made it. The folder is also its Hugging Face folder."""
