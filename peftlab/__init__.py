"""peftlab: parameter-efficient fine-tuning in JAX, on any layer layout and any mesh."""

# The protocol.
from peftlab._parts import AdapterConstant as AdapterConstant
from peftlab._parts import AdapterParam as AdapterParam
from peftlab._parts import Constant as Constant
from peftlab._parts import Parts as Parts
from peftlab._parts import assert_base_shared as assert_base_shared
from peftlab._parts import merge as merge
from peftlab._parts import nbytes as nbytes
from peftlab._parts import split as split
from peftlab._parts import trainable as trainable
from peftlab._stack import stack as stack

# Adapter types.
from peftlab._adapter import Adapter as Adapter
from peftlab._adapter import Base as Base
from peftlab._adapter import Slot as Slot
from peftlab._adapter import Values as Values
from peftlab._adapter import adapter_types as adapter_types
from peftlab._adapter import constant as constant
from peftlab._adapter import copy as copy
from peftlab._adapter import initial as initial
from peftlab._adapter import register_adapter as register_adapter
from peftlab._adapter import together as together
from peftlab._adapter import zeros as zeros

# Layers of any type.
from peftlab._kernel import register_layer as register_layer
from peftlab._kernel import register_norm as register_norm
from peftlab._kernel import register_point as register_point

# Places without a weight, and the tokens of a batch.
from peftlab._batch import Batch as Batch
from peftlab._batch import offering as offering
from peftlab._points import Point as Point
from peftlab._points import before as before

# Attaching.
from peftlab._attach import activate as activate
from peftlab._attach import attach as attach
from peftlab._attach import detach as detach
from peftlab._attach import disabled as disabled
from peftlab._moments import Moments as Moments
from peftlab._moments import input_moments as input_moments
from peftlab._report import Report as Report

# Quantized bases.
from peftlab.quant.convert import dequantize as dequantize
from peftlab.quant.convert import quantize as quantize

# Files.
from peftlab.formats.adapter_folder import load_adapter as load_adapter
from peftlab.formats.adapter_folder import save_adapter as save_adapter
from peftlab._plugin_file import load_plugin as load_plugin

# Models.
from peftlab.models.load import load_model as load_model
