"""Texts of compiled programs, cut from what the compiler for a TPU v6e gave, names shortened."""

# ruff: noqa: E501

# A loop of 4 trips over stacked kernels: slice, gather over 8 devices, multiply, write in place.
LOOP = """HloModule jit_step, is_scheduled=true

%slice_one (param_0.1: bf16[4,32,512], param_1.1: s32[]) -> bf16[32,512] {
  %param_0.1 = bf16[4,32,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1 = s32[]{:T(128)S(6)} parameter(1)
  %zero.1 = s32[]{:T(128)} constant(0)
  %slice.1 = bf16[1,32,512]{2,1,0:T(8,128)(2,1)} dynamic-slice(%param_0.1, %param_1.1, %zero.1, %zero.1), dynamic_slice_sizes={1,32,512}
  ROOT %bitcast.1 = bf16[32,512]{1,0:T(8,128)(2,1)S(1)} bitcast(%slice.1)
}

%product (param_0.2: bf16[512,256], param_1.2: bf16[256,512], param_2.2: bf16[4,512,512], param_3.2: s32[]) -> (bf16[4,512,512], bf16[512,512]) {
  %param_2.2 = bf16[4,512,512]{2,1,0:T(8,128)(2,1)} parameter(2)
  %param_0.2 = bf16[512,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.2 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %convolution.2 = bf16[512,512]{1,0:T(8,128)(2,1)} convolution(%param_0.2, %param_1.2), dim_labels=bf_io->bf, metadata={op_name="jit(step)/while/body/dot_general"}
  %bitcast.2 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} bitcast(%convolution.2)
  %param_3.2 = s32[]{:T(128)S(6)} parameter(3)
  %zero.2 = s32[]{:T(128)} constant(0)
  %update.2 = bf16[4,512,512]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%param_2.2, %bitcast.2, %param_3.2, %zero.2, %zero.2)
  ROOT %tuple.2 = (bf16[4,512,512]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) tuple(%update.2, %convolution.2)
}

%body (arg: (s32[], bf16[4,32,512], bf16[4,512,512], bf16[512,256])) -> (s32[], bf16[4,32,512], bf16[4,512,512], bf16[512,256]) {
  %arg = (s32[]{:T(128)}, bf16[4,32,512]{2,1,0:T(8,128)(2,1)}, bf16[4,512,512]{2,1,0:T(8,128)(2,1)}, bf16[512,256]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %kernels = bf16[4,32,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %kept = bf16[4,512,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=2
  %x = bf16[512,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%arg), index=3
  %one = s32[]{:T(128)} constant(1)
  %slice_fusion = bf16[32,512]{1,0:T(8,128)(2,1)S(1)} fusion(%kernels, %counter), kind=kLoop, calls=%slice_one, backend_config={"flag_configs":[],"window_config":{"estimated_cycles":"2200","cost_model_type":"COST_MODEL_TYPE_INVALID"}}
  %all-gather.1 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} all-gather(%slice_fusion), channel_id=2, replica_groups=mesh['data'=2,'fsdp'=8] {'fsdp'}, dimensions={0}, use_global_device_ids=true, backend_config={"collective_algorithm_config":{"debug":"\\ngroup_size = 8 \\n"}}
  %product_fusion = (bf16[4,512,512]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) fusion(%x, %all-gather.1, %kept, %counter), kind=kOutput, calls=%product, backend_config={"window_config":{"estimated_cycles":"1152","cost_model_type":"COST_MODEL_TYPE_CLASSIC"}}
  %written = bf16[4,512,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%product_fusion), index=0
  %next = s32[]{:T(128)} add(%counter, %one)
  ROOT %out = (s32[]{:T(128)}, bf16[4,32,512]{2,1,0:T(8,128)(2,1)}, bf16[4,512,512]{2,1,0:T(8,128)(2,1)}, bf16[512,256]{1,0:T(8,128)(2,1)S(1)}) tuple(%next, %kernels, %written, %x)
}

%condition (state: (s32[], bf16[4,32,512], bf16[4,512,512], bf16[512,256])) -> pred[] {
  %last = s32[]{:T(128)} constant(4)
  %state = (s32[]{:T(128)}, bf16[4,32,512]{2,1,0:T(8,128)(2,1)}, bf16[4,512,512]{2,1,0:T(8,128)(2,1)}, /*index=3*/bf16[512,256]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%count, %last), direction=LT, metadata={op_name="jit(step)/while/cond/lt"}
}

ENTRY %main (kernels_in: bf16[4,32,512], x_in: bf16[512,256]) -> bf16[4,512,512] {
  %kernels_in = bf16[4,32,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x_in = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(1)
  %start = s32[]{:T(128)} constant(0)
  %copy.start = s32[]{:T(128)} copy(%start), backend_config={"flag_configs":[]}
  %copy-start.x = (bf16[512,256]{1,0:T(8,128)(2,1)S(1)}, bf16[512,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x_in)
  %copy-done.x = bf16[512,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.x)
  %room = bf16[4,512,512]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %tuple.in = (s32[]{:T(128)}, bf16[4,32,512]{2,1,0:T(8,128)(2,1)}, bf16[4,512,512]{2,1,0:T(8,128)(2,1)}, bf16[512,256]{1,0:T(8,128)(2,1)S(1)}) tuple(%copy.start, %kernels_in, %room, %copy-done.x)
  %while.1 = (s32[]{:T(128)}, bf16[4,32,512]{2,1,0:T(8,128)(2,1)}, bf16[4,512,512]{2,1,0:T(8,128)(2,1)}, bf16[512,256]{1,0:T(8,128)(2,1)S(1)}) while(%tuple.in), condition=%condition, body=%body, metadata={op_name="jit(step)/while"}
  ROOT %result = bf16[4,512,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%while.1), index=2
}
"""

# How batched products look on a TPU: convolutions over dilated inputs. (line, operands, product).
# Each is named by what it computes; the last number is 2 x multiplications by hand.
PRODUCTS = (
  # x [512, 256] @ w [256, 8]
  ('bf16[512,8]', ('bf16[512,256]', 'bf16[256,8]'), 'dim_labels=bf_io->bf', 2 * 512 * 256 * 8),
  # the same, with the kernel [out, in]
  ('bf16[512,8]', ('bf16[512,256]', 'bf16[8,256]'), 'dim_labels=bf_oi->bf', 2 * 512 * 256 * 8),
  # contracts over 4 heads of 64
  (
    'bf16[512,256,1]',
    ('bf16[512,4,64]', 'bf16[4,64,256]'),
    'window={size=4}, dim_labels=b0f_0io->bf0',
    2 * 512 * 4 * 64 * 256,
  ),
  # bhqd,bhkd->bhqk: 2 x 2 products [512, 64] @ [64, 256]
  (
    'f32[2,2,512,256]',
    ('bf16[2,2,512,64]', 'bf16[2,2,256,64]'),
    'window={size=2x2 stride=1x1 pad=1_1x1_1 lhs_dilate=2x2 rhs_reversal=1x1}, dim_labels=01bf_01oi->01bf',
    2 * 4 * 512 * 64 * 256,
  ),
)
