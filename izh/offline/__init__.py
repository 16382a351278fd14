"""What stands behind `izh.LLM`: the engine in the caller's own process, stepped by whoever waits for an answer.

`engine.py` steps, `pooling.py` embeds and reranks, `progress.py` shows how far that is.
"""
