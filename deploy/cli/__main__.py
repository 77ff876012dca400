"""`python -m deploy.cli` is `topwork`."""

from deploy.cli import main

if __name__ == "__main__":
    main()
