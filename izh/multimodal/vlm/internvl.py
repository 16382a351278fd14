"""InternVL (as transformers writes it): an image is cut into tiles by its shape, with a small whole if there are several.

Its rows lie side by side between two boundary tokens.
"""

from izh.multimodal.vlm.family import TiledFamily


class InternVL(TiledFamily):
    model_type = "internvl"
    processor_class = "InternVLProcessor"
