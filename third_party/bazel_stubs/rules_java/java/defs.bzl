def _add(a):
    a["tags"] = (a.pop("tags", None) or []) + ["__JAVA_RULES_MIGRATION_DO_NOT_USE_WILL_BREAK__"]
    return a

def java_binary(**a):
    native.java_binary(**_add(a))

def java_import(**a):
    native.java_import(**_add(a))

def java_library(**a):
    native.java_library(**_add(a))

def java_toolchain(**a):
    native.java_toolchain(**_add(a))

def java_runtime(**a):
    native.java_runtime(**_add(a))

def java_plugin(**a):
    native.java_plugin(**_add(a))

def java_test(**a):
    native.java_test(**_add(a))

def java_package_configuration(**a):
    native.java_package_configuration(**_add(a))
