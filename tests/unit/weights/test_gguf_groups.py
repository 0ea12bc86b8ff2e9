"""GGUF blocks kept packed stand for what the gguf library makes of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from unit.weights.tiny_llama import HIDDEN, halves_of_heads, packed_matrix, random_tensors, write_gguf
