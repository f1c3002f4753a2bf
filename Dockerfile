# mkdir -p runs
# docker build -t gpt2-chinese .
# docker run --rm -v "$PWD/runs:/course/runs" gpt2-chinese        trains chapter 07, as README's first command does
#
# The RUN lines are the steps of README on a new machine. apptainer.def has the same ones, and tests/fresh takes them in a new
# Debian: tests/fresh/test_steps.py holds the three equal.
FROM debian:bookworm-slim
# The files of .dockerignore stay outside.
COPY . /course
WORKDIR /course
# Any user may run the image; caches need a folder that any user may write.
ENV HOME=/tmp
RUN apt-get update
RUN apt-get install --yes --no-install-recommends git python3-venv
RUN PIP_NO_CACHE_DIR=1 bash scripts/python.sh -c "import torch"
CMD ["bash", "chapters/07_patrickstar/train.sh"]
