{{/* Several models behind one release's routers: docs/use/kubernetes.md. */}}

{{/* The file of models that routers serve beside the first. */}}
{{- define "tandem.modelsToml" -}}
{{- range $name, $model := .Values.router.models }}
[models.{{ $name | toJson }}]
{{- range $key, $value := $model }}
{{ $key }} = {{ $value | toJson }}
{{- end }}
{{ end }}
{{- end -}}

{{/* Of `router.models`, what a router would refuse when it starts. */}}
{{- define "tandem.checkModels" -}}
{{- $values := .Values -}}
{{- $folders := list (ternary (dir $values.model.bundledPath) $values.model.mountPath (eq $values.model.source "bundled")) -}}
{{- range (include "tandem.values" (dict "root" . "part" "router") | fromYaml).extraVolumeMounts -}}
{{- $folders = append $folders (trimSuffix "/" .mountPath) -}}
{{- end -}}
{{- $first := default dict $values.config.model -}}
{{- $firstName := include "tandem.modelName" . -}}
{{- $owners := dict $firstName "the first model" -}}
{{- range splitList "," (default "" $first.aliases) -}}
{{- $_ := set $owners (trim .) "the first model" -}}
{{- end -}}
{{- range $name, $model := $values.router.models -}}
{{- $isMounted := false -}}
{{- range $folders -}}
{{- $isMounted = or $isMounted (eq . (trimSuffix "/" $model.path)) (hasPrefix (printf "%s/" .) $model.path) -}}
{{- end -}}
{{- if not $isMounted -}}
{{- fail (printf "router.models.%s.path = %q: no volume of the routers has it. Fix: a folder below %s, or one of router.extraVolumeMounts" $name $model.path (join " or " $folders)) -}}
{{- end -}}
{{- range prepend (default list $model.aliases) $name -}}
{{- if hasKey $owners . -}}
{{- fail (printf "router.models.%s = %q: is a name of %s, too. Fix: a name of its own" $name . (get $owners .)) -}}
{{- end -}}
{{- $_ := set $owners . $name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of `join`: what belongs to the release that has the routers. */}}
{{- define "tandem.checkJoin" -}}
{{- $values := .Values -}}
{{- $join := $values.join -}}
{{- if and $join.fullname (not $join.release) -}}
{{- fail (printf "join.fullname = %q: join.release is empty. Fix: the release that has the routers" $join.fullname) -}}
{{- end -}}
{{- if $join.release -}}
{{- if eq $join.release .Release.Name -}}
{{- fail (printf "join.release = %q: is this release. Fix: another one, or empty for routers of its own" $join.release) -}}
{{- end -}}
{{- if $values.router.models -}}
{{- fail (printf "router.models = %s: with join.release there are no routers here. Fix: name them in the release %s" (keys $values.router.models | sortAlpha | toJson) $join.release) -}}
{{- end -}}
{{- if $values.keys.existingSecret -}}
{{- fail (printf "keys.existingSecret = %q: with join.release there is no HTTP here. Fix: keys in the release %s; one for `helm test` in test.keySecret" $values.keys.existingSecret $join.release) -}}
{{- end -}}
{{- $enabled := dict "ingress" $values.ingress "route" $values.route "httpRoute" $values.httpRoute "inferencePool" $values.inferencePool "monitoring.serviceMonitor" $values.monitoring.serviceMonitor -}}
{{- range $name, $value := $enabled -}}
{{- if $value.enabled -}}
{{- fail (printf "%s.enabled = true: with join.release there are no routers here. Fix: enable it in the release %s" $name $join.release) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
