"""Quantized bases: codes and scales in the place of a weight; quantizers, encoding, products."""

from peftlab.quant.convert import dequantize as dequantize
from peftlab.quant.convert import error as error
from peftlab.quant.convert import held as held
from peftlab.quant.convert import quantize as quantize
from peftlab.quant.quantized import Form as Form
from peftlab.quant.quantized import Quantized as Quantized
from peftlab.quant.quantizer import Quantizer as Quantizer
from peftlab.quant.quantizer import get_quantizer as get_quantizer
from peftlab.quant.quantizer import register as register
from peftlab.quant.qwix_arrays import from_qwix as from_qwix
from peftlab.quant.qwix_arrays import to_qwix as to_qwix
from peftlab.quant.report import QuantReport as QuantReport
