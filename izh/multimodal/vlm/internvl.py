"""InternVL (as transformers writes it): an image is cut into tiles by its shape, and if there are several comes once
more as a small whole. All its rows lie side by side between two boundary tokens.
"""

from izh.multimodal.vlm.family import TiledFamily


class InternVL(TiledFamily):
    model_type = "internvl"
    processor_class = "InternVLProcessor"
