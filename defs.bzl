"""The two kinds of target of this project, over bazel's native Python rules."""

def peftlab_library(name, **kwargs):
    """One Python module.

    Args:
      name: the module's own name.
      **kwargs: srcs, deps, data, testonly as in py_library.
    """
    native.py_library(
        name = name,
        srcs_version = "PY3",
        visibility = ["//visibility:public"],
        **kwargs
    )

def peftlab_test(name, srcs, deps = [], data = [], **kwargs):
    """One test file, run by pytest with the project's settings.

    Args:
      name: the test file's name without its ending.
      srcs: the one test file.
      deps: the modules that it imports, and the conftest files above it.
      data: the files that it reads.
      **kwargs: size, tags as in py_test.
    """
    native.py_test(
        name = name,
        srcs = srcs + ["//tools:pytest_main.py"],
        main = "//tools:pytest_main.py",
        args = ["$(location %s)" % src for src in srcs],
        data = data + [
            "//:pyproject.toml",
            # A test is run anew when the environment changes.
            "//:requirements/lock.txt",
        ],
        deps = deps,
        python_version = "PY3",
        srcs_version = "PY3",
        **kwargs
    )
