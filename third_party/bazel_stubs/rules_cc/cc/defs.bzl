"""Stub of @rules_cc: the native rules, for an offline `bazel build` of Python targets."""

def _add(attrs):
    t = attrs.pop("tags", None) or []
    attrs["tags"] = t + ["__CC_RULES_MIGRATION_DO_NOT_USE_WILL_BREAK__"]
    return attrs

def cc_binary(**a):
    native.cc_binary(**_add(a))

def cc_test(**a):
    native.cc_test(**_add(a))

def cc_library(**a):
    native.cc_library(**_add(a))

def cc_import(**a):
    native.cc_import(**_add(a))

def cc_proto_library(**a):
    native.cc_proto_library(**_add(a))

def cc_toolchain(**a):
    native.cc_toolchain(**_add(a))

def cc_toolchain_suite(**a):
    native.cc_toolchain_suite(**_add(a))

def cc_libc_top_alias(**a):
    native.cc_libc_top_alias(**_add(a))

def fdo_profile(**a):
    native.fdo_profile(**_add(a))

def fdo_prefetch_hints(**a):
    native.fdo_prefetch_hints(**_add(a))

def objc_library(**a):
    native.objc_library(**_add(a))

def objc_import(**a):
    native.objc_import(**_add(a))

def compiler_flag(**a):
    pass

def cc_flags_supplier(**a):
    pass

def cc_host_toolchain_alias(**a):
    native.cc_host_toolchain_alias(**_add(a))
