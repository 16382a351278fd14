"""Text to tokens and back: tokenizer, chat template, incremental detokenizer, stop strings, and engine results to
user outputs. Runs in the frontend process.

Must not know: torch, the engine, HTTP.
"""
