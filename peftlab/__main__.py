"""`python -m peftlab`: the same as the command `peftlab`."""

import sys

from peftlab import cli

if __name__ == '__main__':
  sys.exit(cli.main())
