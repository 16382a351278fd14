"""Trained vision-language checkpoints, each by its own conventions.

One small file per family says how its images are prepared and encoded; `model.py` is the face. The language model is
not here: it is a decoder like any other (izh/model/families/image_text.py).
"""
