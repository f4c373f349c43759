{{/* The TOML file, and what follows from it. */}}

{{/* What this release's workers serve, as clients ask for it. */}}
{{- define "tandem.modelName" -}}
{{- $model := default dict .Values.config.model -}}
{{- default (include "tandem.modelPath" . | base) $model.name -}}
{{- end -}}

{{/* What the chart decides itself; it wins over `config`, whose schema does not let it be set. */}}
{{- define "tandem.ownConfig" -}}
cluster:
  name: {{ include "tandem.fullname" . | quote }}
  host: {{ .Values.listen | quote }}
  # Workers get theirs on the command line. A router's own HTTP processes call it here.
  advertise: localhost
model:
  path: {{ include "tandem.modelPath" . | quote }}
router:
  {{- if .Values.keys.existingSecret }}
  keys_file: /etc/tandem-keys/{{ .Values.keys.file }}
  {{- if .Values.keys.scrapeKey }}
  metrics_access: key
  {{- end }}
  {{- else }}
  allow_anonymous: true
  {{- end }}
  {{- if .Values.router.models }}
  models_file: /etc/tandem/models.toml
  {{- end }}
  port: {{ .Values.router.ports.http }}
  control_port: {{ .Values.router.ports.control }}
{{- if .Values.tls.enabled }}
tls:
  mode: files
  cert: /etc/tandem-tls/tls.crt
  key: /etc/tandem-tls/tls.key
  ca: /etc/tandem-tls/ca.crt
  mutual: {{ .Values.tls.mutual }}
{{- end }}
{{- end -}}

{{- define "tandem.toml" -}}
{{- $own := include "tandem.ownConfig" . | fromYaml -}}
{{- /* Written out, so that the next upgrade sees what this one had: tandem.checkDrafts. */}}
{{- $said := dict "decode" (dict "num_speculative_tokens" "default") -}}
{{- $config := mergeOverwrite $said (deepCopy .Values.config) $own -}}
{{- range $section := keys $config | sortAlpha }}
{{- $tables := index $config $section }}
{{- $isList := kindIs "slice" $tables }}
{{- range $table := ternary $tables (list $tables) $isList }}
{{ ternary (printf "[[%s]]" $section) (printf "[%s]" $section) $isList }}
{{- range $key := keys $table | sortAlpha }}
{{- /* A JSON string, number or boolean is one of TOML, too. */}}
{{ $key }} = {{ index $table $key | toJson }}
{{- end }}
{{ end }}
{{- end }}
{{- end -}}

{{/*
Refuse an upgrade that turns drafts on and does not say so: while pods of both roles are renewed, old
ones and new ones do not pair. Where a GPU has a given number of blocks the default is none, as before.
(dict "root" $ "live" the live ConfigMap)
*/}}
{{- define "tandem.checkDrafts" -}}
{{- $config := .root.Values.config -}}
{{- $isOpen := not (hasKey (default dict $config.decode) "num_speculative_tokens") -}}
{{- range $role := list "prefill" "decode" -}}
{{- $section := default dict (index $config $role) -}}
{{- $asManyAsFit := has (toString (default "auto" $section.num_blocks)) (list "auto" "0") -}}
{{- if and (eq (default "cpu" $section.device) "cuda") (not $asManyAsFit) -}}
{{- $isOpen = false -}}
{{- end -}}
{{- end -}}
{{- $toml := get (default dict .live.data) "config.toml" -}}
{{- $hadNone := or (not (contains "num_speculative_tokens" $toml)) (contains "num_speculative_tokens = 0" $toml) -}}
{{- if and $isOpen $toml $hadNone -}}
{{- fail "config.decode.num_speculative_tokens is left out: this release runs without drafts, and the default is one where there can be any; workers with and without do not pair, so that a rolling update would stop service for a while. Fix: 0 to stay without; 1 in a second release, or here with that gap" -}}
{{- end -}}
{{- end -}}

{{/* Ranks of one worker: (dict "root" $ "role" "decode"). */}}
{{- define "tandem.ranks" -}}
{{- $section := default dict (index .root.Values.config .role) -}}
{{- mul (default 1 $section.dp | int) (default 1 (ternary $section.tp 1 (eq .role "prefill")) | int) -}}
{{- end -}}

{{- define "tandem.ranksPerHost" -}}
{{- $ranks := include "tandem.ranks" . | int -}}
{{- $hosts := (include "tandem.values" (dict "root" .root "part" .role) | fromYaml).hosts | int -}}
{{- if mod $ranks $hosts -}}
{{- fail (printf "%s.hosts = %d: the %d ranks of one worker (config.%s) are not shared out evenly. Fix: a divisor of %d" .role $hosts $ranks .role $ranks) -}}
{{- end -}}
{{- div $ranks $hosts -}}
{{- end -}}

{{/* Ranks of one host that take requests, and so serve gRPC and metrics: with prefill.tp one for all. */}}
{{- define "tandem.endpointsPerHost" -}}
{{- $section := default dict (index .root.Values.config .role) -}}
{{- if and (eq .role "prefill") (gt (default 1 $section.tp | int) 1) -}}
1
{{- else -}}
{{- include "tandem.ranksPerHost" . -}}
{{- end -}}
{{- end -}}

{{- define "tandem.device" -}}
{{- $section := default dict (index .root.Values.config .role) -}}
{{- default "cpu" $section.device -}}
{{- end -}}

{{/* What the schema cannot say because it takes two values. */}}
{{- define "tandem.check" -}}
{{- $values := .Values -}}
{{- if not $values.enabled -}}
{{- fail "enabled = false: only a chart that has this one among its own reads it, by `condition: tandem.enabled`. Fix: true, or uninstall the release" -}}
{{- end -}}
{{- include "tandem.checkModels" . -}}
{{- include "tandem.checkHostNetwork" . -}}
{{- include "tandem.checkJoin" . -}}
{{- include "tandem.checkModel" . -}}
{{- if not (or $values.keys.existingSecret $values.keys.allowAnonymous $values.join.release) -}}
{{- fail "keys.existingSecret = \"\": whoever reaches HTTP could ask. Fix: a Secret with a file of `tandem keys add`, or keys.allowAnonymous" -}}
{{- end -}}
{{- if and $values.keys.existingSecret $values.keys.allowAnonymous -}}
{{- fail "keys.allowAnonymous = true: every request needs a key of keys.existingSecret. Fix: one of the two" -}}
{{- end -}}
{{- if and $values.keys.scrapeKey (not $values.keys.existingSecret) -}}
{{- fail (printf "keys.scrapeKey = %q: there is no Secret that has it. Fix: keys.existingSecret" $values.keys.scrapeKey) -}}
{{- end -}}
{{- if and $values.test.keySecret (not $values.join.release) (not $values.keys.existingSecret) -}}
{{- fail (printf "test.keySecret = %q: these routers ask for no key. Fix: empty, or keys.existingSecret" $values.test.keySecret) -}}
{{- end -}}
{{- if and $values.tls.enabled (not $values.tls.existingSecret) (not $values.tls.certManager.enabled) -}}
{{- fail "tls.existingSecret = \"\": nobody makes the certificate. Fix: a Secret's name, or tls.certManager.enabled" -}}
{{- end -}}
{{- if and $values.tls.certManager.enabled (not $values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name = \"\": cert-manager needs an issuer. Fix: its name" -}}
{{- end -}}
{{- if and $values.route.enabled (has $values.route.termination (list "reencrypt" "passthrough")) (not $values.tls.enabled) -}}
{{- fail (printf "route.termination = %s: the routers do not encrypt. Fix: edge, or tls.enabled" $values.route.termination) -}}
{{- end -}}
{{- if and $values.tls.certManager.enabled (not $values.tls.enabled) -}}
{{- fail "tls.certManager.enabled = true: the certificate would not be used. Fix: tls.enabled" -}}
{{- end -}}
{{- if and $values.inferencePool.enabled (not $values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.endpointPicker.name = \"\": a pool needs one. Fix: the Service of the endpoint picker" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs = []: the route is nobody's. Fix: the gateways" -}}
{{- end -}}
{{- if and $values.httpRoute.toInferencePool (not $values.inferencePool.enabled) -}}
{{- fail "httpRoute.toInferencePool = true: there is no pool. Fix: inferencePool.enabled" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $worker := include "tandem.values" (dict "root" $ "part" $role) | fromYaml -}}
{{- $scaling := $worker.autoscaling -}}
{{- if and (eq $scaling.mode "hpa") (eq ($scaling.minReplicas | int) 0) -}}
{{- fail (printf "%s.autoscaling.minReplicas = 0: an HPA keeps one at least. Fix: 1, or mode keda" $role) -}}
{{- end -}}
{{- if and (eq (include "tandem.device" (dict "root" $ "role" $role)) "cuda") (not (or $worker.gpu.resource $worker.resourceClaims)) -}}
{{- fail (printf "%s.gpu.resource = \"\": no container would get a GPU. Fix: its name, or %s.resourceClaims" $role $role) -}}
{{- end -}}
{{- if and (eq $worker.updateStrategy.type "OnDelete") (gt ($worker.hosts | int) 1) -}}
{{- fail (printf "%s.updateStrategy.type = OnDelete: a LeaderWorkerSet renews its groups itself. Fix: RollingUpdate with a partition" $role) -}}
{{- end -}}

{{- if gt ($scaling.minReplicas | int) ($scaling.maxReplicas | int) -}}
{{- fail (printf "%s.autoscaling.minReplicas = %v: above maxReplicas, %v. Fix: %v or less" $role $scaling.minReplicas $scaling.maxReplicas $scaling.maxReplicas) -}}
{{- end -}}
{{- $ranks := include "tandem.ranksPerHost" (dict "root" $ "role" $role) -}}
{{- end -}}
{{- $section := default dict $values.config.prefill -}}
{{- if and (gt (default 1 $section.tp | int) 1) (gt (default 1 $section.dp | int) 1) -}}
{{- fail (printf "config.prefill.dp = %v: config.prefill.tp is %v. Fix: 1 in one of them" $section.dp $section.tp) -}}
{{- end -}}
{{- end -}}

{{/* A NetworkPolicy sees pods by their labels, and pods in their node's network by its address alone. */}}
{{- define "tandem.checkHostNetwork" -}}
{{- $policy := .Values.networkPolicy -}}
{{- if and $policy.enabled (not $policy.nodeCIDRs) -}}
{{- range $part := list "router" "prefill" "decode" -}}
{{- if (include "tandem.values" (dict "root" $ "part" $part) | fromYaml).hostNetwork -}}
{{- fail (printf "%s.hostNetwork = true: networkPolicy would keep its pods from all others. Fix: the nodes' addresses in networkPolicy.nodeCIDRs, or networkPolicy.enabled=false" $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
