"""Gemma 3: square pictures of fixed size, 256 rows each between boundaries; crops of long ones where the checkpoint
asks for them. The decoder lets an image's rows see each other both ways (`ModelSpec.images_both_ways`).
"""

from izh.multimodal.vlm.family import TiledFamily


class Gemma3(TiledFamily):
    model_type = "gemma3"
    processor_class = "Gemma3Processor"
