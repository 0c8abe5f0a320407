# @title Helper: attempt what should fail, and return the message
import contextlib, io, textwrap

def attempt(function, *inputs):
    """The message of the error that function(*inputs) raises; no error is a mistake."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # JAX may print a path as well
            function(*inputs)
    except Exception as error:
        message = str(error).split(" This error occurs at source")[0].strip()
        paragraph = message.split("\n\n")[0]
        return textwrap.fill(f"{type(error).__name__}: {paragraph}", 88)
    raise AssertionError("nothing was raised")
