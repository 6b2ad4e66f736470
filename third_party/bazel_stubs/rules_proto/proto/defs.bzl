def proto_library(**a):
    pass

def proto_lang_toolchain(**a):
    pass
