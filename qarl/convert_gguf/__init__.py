"""Make an ordinary model folder of a GGUF file, and say what the file and its conversion change."""
