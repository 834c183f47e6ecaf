# Added to shtab's script for zsh: completion of argument values, and of ./launch.sh.
_bertrain_file() { _files }
_bertrain_dir() { _files -/ }
_bertrain_dir_of_run() { _alternative "runs:run:(runs/*(N/:t))" "folders:folder:_files -/" }
_bertrain_yaml() { _files -g "*.y*ml" }
_bertrain_file_of_pretrain() { compadd -- PRETRAIN; _bertrain_yaml }
_bertrain_file_of_finetune() { compadd -- FINETUNE; _bertrain_yaml }
_bertrain_file_of_any() { _bertrain_example; _bertrain_yaml }
_bertrain_file_of_job() { compadd -- pretrain finetune prepare; _bertrain_file_of_any }
_bertrain_example() { compadd -- PRETRAIN FINETUNE }
_bertrain() {
  local extra=(help)
  if [[ $service == launch.sh ]]; then
    [[ -d ${${words[1]:h}/#\~/$HOME}/finetune ]] || { _default; return }
    extra+=(bench docs test)
  fi
  if ((CURRENT == 2)); then compadd -- $extra; fi
  if [[ $words[2] == help ]]; then _shtab_bertrain_commands; else _shtab_bertrain; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _bertrain "$@"
else
  (($+functions[compdef])) || { autoload -Uz compinit && compinit }
  compdef _bertrain bertrain launch.sh
fi
